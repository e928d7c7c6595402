"""deploy/compose.yaml with real engines: the commands of its CPU profile as processes on loopback."""

from collections.abc import AsyncIterator

import pytest

from kvlease.dev.check import Target, run_check
from kvlease.dev.engine_env import ensure_engine_environment
from kvlease.dev.tiny_model import ensure_tiny_model
from kvlease.dev.warm import warm_handshakes
from stubs.compose import DEPLOY, LocalFleet, local_fleet, read_variables

ENGINES_HEALTHY_S = 400.0
BLOCK_TOKENS = 32
MODEL = "tiny-qwen3"

# Two engines on two cores: one thread each, and one process each.
SMALL = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "UCX_LOG_LEVEL": "warn",
}
# Beside two engines a service may not run for seconds, in which nothing is to end.
PATIENT = {"KVLEASE_ROUTER_PROVISIONAL_S": "20", "KVLEASE_SIDECAR_ENGINE_TTL_S": "60"}


@pytest.fixture
async def fleet(engines_lock: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    directory = tmp_path_factory.mktemp("c")
    root = DEPLOY.parent
    vllm = directory / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(f'#!/bin/sh\nexec {ensure_engine_environment(print)} -m vllm.entrypoints.cli.main "$@"\n')
    vllm.chmod(0o755)
    programs = {
        "vllm": vllm,
        "engine-entrypoint": DEPLOY / "engine-entrypoint.sh",
        "engine-health": DEPLOY / "engine-health",
    }
    variables = read_variables(DEPLOY / ".env") | {
        "MODEL": str(ensure_tiny_model()),
        "SERVED_MODEL_NAME": MODEL,
        "CPU_DTYPE": "float32",
        "CPU_KVCACHE_GIB": "1",
    }
    path = {"PYTHONPATH": f"{root / 'services'}:{root / 'connector'}"}
    fleet = local_fleet("cpu", directory, variables, programs, SMALL | PATIENT | path)
    for service in fleet.services.values():
        # As patient as the services are on this machine.
        service.spec["command"][-1] = service.spec["command"][-1].replace(
            '"socket_dir"', '"pin_wait_s":10.0,"read_part_s":30.0,"socket_dir"'
        )
    try:
        yield fleet
    finally:
        await fleet.stop()


async def test_the_cpu_profile_serves_the_three_turns_on_real_engines(fleet: LocalFleet) -> None:
    await fleet.start(sorted(fleet.services))
    await fleet.healthy(ENGINES_HEALTHY_S)
    first, second = (f"http://{fleet.address(router, 8080)}" for router in ("router-1", "router-2"))
    prefill, decode = (
        f"http://{fleet.address(engine, 8000)}" for engine in ("engine-prefill-cpu", "engine-decode-cpu")
    )
    await warm_handshakes(second, MODEL)
    result = await run_check(
        Target(first, [prefill, decode], decode, MODEL, BLOCK_TOKENS), "compose", lambda _: None, edited=True
    )
    assert [turn.problem for turn in result.turns] == ["", "", "", ""]
    assert result.ok
    assert [turn.path for turn in result.turns] == ["recompute", "append", "readback", "readback"]
