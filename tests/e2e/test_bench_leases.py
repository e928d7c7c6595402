"""The benchmark of leases runs on a real registry, sidecar and etcd, and says what it saw."""

import json
from argparse import ArgumentParser

import pytest

from kvlease.bench import leases
from kvlease.bench.spread import Spread


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


def test_an_engine_that_decodes_applies_every_renewal_and_pin(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    leases.add_arguments(parser)
    asked = ["--engine", "sim", "--leases", "2", "--seconds", "1", "--output", "json"]
    assert leases.run(parser.parse_args(asked)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["leases"] == 2
    assert document["idle"]["renewal"]["count"] > 0
    assert document["busy"]["pin"]["count"] > 0
    assert document["busy"]["decoded_tokens_a_second"] > 0


@pytest.mark.parametrize("arguments", [["--leases", "0"], ["--leases", "1001"], ["--seconds", "0"]])
def test_a_number_of_leases_that_no_engine_holds_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    leases.add_arguments(parser)
    assert leases.run(parser.parse_args(["--engine", "sim", *arguments])) == 2
    assert "1 to 1,000 leases" in capsys.readouterr().err


def test_quantiles_are_those_of_the_times_given() -> None:
    assert Spread.of([second / 1000 for second in range(1, 101)]) == Spread(100, 50.0, 99.0, 100.0)
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0.0)
