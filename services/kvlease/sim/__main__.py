"""`python -m kvlease.sim --port ...`: one simulated engine."""

import sys
from argparse import ArgumentParser

from kvlease.sim.main import add_arguments, run

if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m kvlease.sim", description=__doc__)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
