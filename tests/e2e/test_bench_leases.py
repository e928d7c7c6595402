"""The benchmark of leases runs on a real registry, sidecar and etcd, and says what it saw."""

import json
from argparse import ArgumentParser

import pytest

from kvlease.bench import leases
from kvlease.bench.leases import Spread


def test_a_small_run_renews_every_lease_and_sees_the_end_of_half_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = ArgumentParser()
    leases.add_arguments(parser)
    asked = ["--leases", "40", "--engines", "2", "--seconds", "5", "--output", "json"]
    leases.run(parser.parse_args(asked))
    document = json.loads(capsys.readouterr().out)
    assert (document["few"]["leases"], document["many"]["leases"]) == (2, 40)
    assert document["many"]["renewal"]["count"] == 2
    assert 0 < document["purged_leases"] <= 20
    assert document["purge"]["pin"]["count"] > 0


def test_quantiles_are_those_of_the_times_given() -> None:
    assert Spread.of([second / 1000 for second in range(1, 101)]) == Spread(100, 50.0, 99.0, 100.0)
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0.0)
