"""deploy/compose.yaml: what the specification and its linters say, and the system that it describes, running.

There is no Docker where the tests run: every service's own command is a process on loopback.
"""

import os
import re
import subprocess
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from packaging.requirements import Requirement

from kvlease.dev.check import Target, run_check
from kvlease.dev.warm import warm_handshakes
from stubs.compose import (
    BINARIES,
    DEPLOY,
    VARIABLE,
    LocalFleet,
    local_fleet,
    names_of,
    read_compose,
    read_variables,
)

FILES = ("compose.yaml", "compose.observability.yaml")
DOCKERFILES = ("Dockerfile.services", "Dockerfile.engine")
VARIABLES = read_variables(DEPLOY / ".env")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(params=FILES)
def compose(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_compose(DEPLOY / request.param, VARIABLES)


def hadolint(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BINARIES / "hadolint"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- what the files say -------------------------------------------------------------------------------------


def test_the_files_keep_to_the_compose_specification(compose: dict[str, Any]) -> None:
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(compose)).validate()


@pytest.mark.parametrize(
    ("line", "wrong"), [("command:", "comand:"), ("networks: [control]", "networks: [controls]")]
)
def test_the_check_finds_what_the_specification_does_not_know(line: str, wrong: str) -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    broken = VARIABLE.sub(lambda found: VARIABLES[found[1]], text.replace(line, wrong))
    assert broken.count(wrong.strip())
    with pytest.raises(ValueError, match=r"comand|controls"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(broken))).validate()


def test_every_variable_is_set_in_env_and_every_one_there_is_used() -> None:
    used = {name for file in FILES for name in VARIABLE.findall((DEPLOY / file).read_text())}
    assert used | {"COMPOSE_PROFILES"} == set(VARIABLES)


def test_only_the_front_and_the_screens_of_operators_are_published_and_on_loopback() -> None:
    published = {
        name: spec["ports"]
        for file in FILES
        for name, spec in read_compose(DEPLOY / file, VARIABLES)["services"].items()
        if "ports" in spec
    }
    assert set(published) == {"router-1", "router-2", "jaeger", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_every_service_has_a_pinned_image_limits_and_drops_what_it_does_not_need(
    compose: dict[str, Any],
) -> None:
    for name, spec in compose["services"].items():
        assert re.search(r":v?\d+\.\d+", spec["image"]), name
        assert spec["deploy"]["resources"]["limits"]["memory"], name
        assert spec["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in spec["security_opt"], name
        assert "depends_on" not in spec, name


def test_etcd_is_full_before_it_is_out_of_memory() -> None:
    """Its data is in a tmpfs, which counts, beside its log and what it keeps in its heap."""
    gibibytes = int(VARIABLES["ETCD_MEMORY"].removesuffix("g"))
    assert int(VARIABLES["ETCD_QUOTA_BYTES"]) <= gibibytes << 28


def test_every_service_of_the_fleet_has_a_health_check() -> None:
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"]
    assert all(spec["healthcheck"]["test"][0] == "CMD" for spec in services.values())


def test_what_asks_nobody_who_comes_is_not_on_the_network_of_clients() -> None:
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"]
    assert {name for name, spec in services.items() if "front" in spec["networks"]} == {
        "router-1",
        "router-2",
    }


def seconds(duration: str) -> int:
    """A duration of a compose file."""
    found = re.fullmatch(r"(\d+)s", duration)
    assert found, duration
    return int(found[1])


@pytest.mark.parametrize("profile", ["cpu", "gpu", "sim"])
def test_each_image_of_ours_is_built_by_one_service_of_a_profile(profile: str) -> None:
    """Several at once fail: each would give its image the same name, and the second finds it taken."""
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"].values()
    chosen = [spec for spec in services if profile in spec.get("profiles", [profile])]
    built = [spec["image"] for spec in chosen if "build" in spec]
    assert sorted(built) == sorted({spec["image"] for spec in chosen if spec["image"].startswith("kvlease-")})


def test_no_service_asks_for_more_processors_than_the_smallest_host_has(compose: dict[str, Any]) -> None:
    limits = {
        name: spec["deploy"]["resources"]["limits"].get("cpus") for name, spec in compose["services"].items()
    }
    assert {name: cpus for name, cpus in limits.items() if cpus is not None and float(cpus) > 1} == {}


def test_a_router_may_end_its_turns_before_it_is_killed_and_gets_as_long_as_engines_to_be_healthy() -> None:
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"]
    starts = {seconds(services[name]["healthcheck"]["start_period"]) for name in services if "cpu" in name}
    for router in (services["router-1"], services["router-2"]):
        assert seconds(router["stop_grace_period"]) > float(
            router["environment"]["KVLEASE_ROUTER_STOP_GRACE_S"]
        )
        assert {seconds(router["healthcheck"]["start_period"])} == starts


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_token_for_models_comes_from_the_shell_and_from_no_file(profile: str) -> None:
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"]
    engines = [spec for spec in services.values() if spec.get("profiles") == [profile]]
    assert [spec["environment"]["HF_TOKEN"] for spec in engines] == [None, None]
    assert "HF_TOKEN" not in VARIABLES


def test_every_folder_of_the_engines_home_that_the_image_makes_is_its_users() -> None:
    """`install -d -o` gives its user the last folder of a path; vLLM makes others beside the model's cache."""
    commands = re.sub(r"\\\n", "", (DEPLOY / "Dockerfile.engine").read_text())
    given = [
        Path(word)
        for options in re.findall(r"install -d ((?:\S+ +)*-o kvlease [^&\n]*)", commands)
        for word in options.split()
        if word.startswith("/home/kvlease/")
    ]
    assert Path("/home/kvlease/.cache/vllm") in given
    home = Path("/home/kvlease")
    between = {parent for path in given for parent in path.parents if parent.is_relative_to(home)}
    assert between - {home} <= set(given)
    for name, spec in read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"].items():
        mounted = [Path(volume.split(":")[1]) for volume in spec.get("volumes", [])]
        assert [path for path in mounted if path.is_relative_to(home) and path not in given] == [], name


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing_in_a_dockerfile(name: str, tmp_path: Path) -> None:
    clean = hadolint(DEPLOY / name)
    assert (clean.returncode, clean.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text((DEPLOY / name).read_text().replace("FROM ${PYTHON_IMAGE}", "FROM python:latest"))
    assert hadolint(broken).returncode != 0


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_stages_pinned_bases_and_no_root(name: str) -> None:
    text = (DEPLOY / name).read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    defaults = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)", text, re.MULTILINE))
    assert all(re.search(r":v?\d+\.\d+\.\d+", defaults[base.strip("${}")]) for base in bases)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001:10001"


def test_what_the_images_copy_is_there_and_not_left_out_of_the_build() -> None:
    kept = {
        line[1:]
        for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name in DOCKERFILES:
        for copied in re.findall(r"^COPY (?!--from)(.*)$", (DEPLOY / name).read_text(), re.MULTILINE):
            sources = [word for word in copied.split()[:-1] if not word.startswith("--")]
            assert all((DEPLOY.parent / source).exists() and source in kept for source in sources), copied


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        (
            "http://collector:4317",
            ["serve", "a model", "--otlp-traces-endpoint=http://collector:4317", "vllm"],
        ),
        ("", ["serve", "a model", ""]),
    ],
)
def test_an_engine_sends_its_spans_where_the_services_send_theirs(
    endpoint: str, told: list[str], tmp_path: Path
) -> None:
    engine = tmp_path / "vllm"
    engine.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "${OTEL_SERVICE_NAME:-}"\n')
    engine.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    command = ["sh", str(DEPLOY / "engine-entrypoint.sh"), "vllm", "serve", "a model"]
    started = subprocess.run(
        command, env=environment | {"OTLP_ENDPOINT": endpoint}, capture_output=True, text=True, check=True
    )
    assert started.stdout.splitlines() == told


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_engines_of_a_profile_are_told_where_traces_go(profile: str) -> None:
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES | {"OTLP_ENDPOINT": "http://c:4317"})[
        "services"
    ]
    engines = [spec for spec in services.values() if spec.get("profiles") == [profile]]
    assert [spec["environment"]["OTLP_ENDPOINT"] for spec in engines] == ["http://c:4317"] * 2


def test_the_image_of_the_services_has_what_pyproject_asks_for_in_one_version_each_and_no_torch() -> None:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["services"]]
    for requirement in map(Requirement, wanted):
        assert requirement.name in versions, f"{requirement}: make constraints.txt again, as its head says"
        assert requirement.specifier.contains(versions[requirement.name]), requirement
    assert not {"torch", "vllm", "nixl", "numpy"} & versions.keys()


def test_prometheus_scrapes_ports_that_services_expose() -> None:
    services = read_compose(DEPLOY / "compose.yaml", VARIABLES)["services"]
    exposed = {
        f"{host}:{port}"
        for name, spec in services.items()
        for host in names_of(name, spec)
        for port in spec["expose"]
    }
    scraped = yaml.safe_load((DEPLOY / "observability" / "prometheus.yaml").read_text())["scrape_configs"]
    targets = [target for job in scraped for group in job["static_configs"] for target in group["targets"]]
    assert len(targets) == len(set(targets)) > 0
    assert set(targets) <= exposed


def test_every_file_that_a_service_mounts_is_there() -> None:
    for file in FILES:
        for name, spec in read_compose(DEPLOY / file, VARIABLES)["services"].items():
            for source in (volume.split(":")[0] for volume in spec.get("volumes", [])):
                assert not source.startswith(".") or (DEPLOY / source).exists(), f"{name}: {source}"


# --- what they start ----------------------------------------------------------------------------------------


@pytest.fixture
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    fleet = local_fleet("sim", tmp_path_factory.mktemp("c"), VARIABLES)
    try:
        yield fleet
    finally:
        await fleet.stop()


async def test_the_services_start_in_any_order_get_healthy_and_serve_the_three_turns(
    fleet: LocalFleet,
) -> None:
    """The routers start first and etcd last: whatever needs another one waits for it."""
    order = sorted(fleet.services, key=lambda name: (name == "etcd", "router" not in name, name))
    await fleet.start(order)
    await fleet.healthy()
    model = VARIABLES["SERVED_MODEL_NAME"]
    first, second = (f"http://{fleet.address(router, 8080)}" for router in ("router-1", "router-2"))
    prefill, decode = (
        f"http://{fleet.address(engine, 8000)}" for engine in ("engine-prefill-sim", "engine-decode-sim")
    )
    await warm_handshakes(second, model)
    target = Target(first, [prefill, decode], decode, model, block_size=16)
    result = await run_check(target, "compose", lambda _: None, edited=False)
    assert result.ok, result.to_json()
    assert [turn.path for turn in result.turns] == ["recompute", "append", "readback"]
    shown = re.findall(
        r"^\s+docker compose .* exec router-1 (kvlease .*)$", (DEPLOY / "README.md").read_text(), re.MULTILINE
    )
    assert len(shown) >= 3
    for command in shown:
        status, output = await fleet.output_of("router-1", command.split("  ")[0].split())
        assert status == 0, f"{command}: {output}"
    ended = await fleet.stop()
    assert {name: status for name, status in ended.items() if status and name != "etcd"} == {}
