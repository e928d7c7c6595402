"""The one command, where not all that its subcommands need is installed."""

import sys
import tomllib
from pathlib import Path
from subprocess import run

import pytest

from kvlease.cli import SERVICES_PACKAGES, main

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
BASE_INSTALL = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
from kvlease.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["router"], "kvlease router: error: this command needs orjson"),
        (["engines"], "kvlease engines: error: this command needs "),
        (["doctor", "--output", "json"], '{"error": {"command": "doctor", "message": "this command needs '),
    ],
)
def test_a_command_whose_packages_an_engines_environment_lacks_says_so(
    arguments: list[str], told: str
) -> None:
    absent = ",".join(SERVICES_PACKAGES - {"google"})  # protobuf is in the base install
    ended = run(
        [sys.executable, "-c", BASE_INSTALL, absent, *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(told)
    assert "kvlease[services]" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_every_package_of_the_services_is_known_as_such() -> None:
    extra = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["services"]
    imported = {"grpcio_health_checking": "grpc_health", "grpcio_reflection": "grpc_reflection"}
    imported["grpcio_status"] = "grpc_status"
    for requirement in extra:
        name = requirement.partition(">")[0].replace("-", "_")
        package = "opentelemetry" if name.startswith("opentelemetry") else imported.get(name, name)
        assert package in SERVICES_PACKAGES


@pytest.mark.parametrize("process", ["registry", "router", "sidecar", "dev"])
def test_a_log_level_that_is_none_is_refused(process: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([process, "--log-level", "verbose"])
    except SystemExit as ended:
        status = ended.code
    told = capfd.readouterr().err
    assert status == 2
    assert "verbose" in told
    assert "debug" in told
