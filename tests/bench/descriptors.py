"""Whether fewer, larger descriptors make a READ faster: vLLM's prepared lists beside one descriptor per run.

    python -m tests.bench.descriptors --output docs/benchmarks/DATE-descriptors.json

NIXL alone, two agents in two processes over UCX on one machine (`tests/bench/descriptor_reads.py`).
"""

import argparse
import json
import subprocess
from pathlib import Path

from kvlease.bench.machine import machine
from kvlease.dev.engine_env import ensure_engine_environment

SCRIPT = Path(__file__).with_name("descriptor_reads.py")
TIMEOUT_S = 600


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-bytes", type=int, default=16384, help="of one block in one region")
    parser.add_argument("--regions", type=int, default=16, help="keys and values of every layer")
    parser.add_argument("--blocks", default="32,128,256", help="that one READ moves")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sizes = [str(arguments.block_bytes), str(arguments.regions), arguments.blocks, str(arguments.repeats)]
    done = subprocess.run(
        [str(ensure_engine_environment()), str(SCRIPT), *sizes],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        print(json.dumps(row))
    if arguments.output is not None:
        document = {
            "machine": machine(),
            "block_bytes": arguments.block_bytes,
            "regions": arguments.regions,
            "repeats": arguments.repeats,
            "reads": rows,
        }
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
