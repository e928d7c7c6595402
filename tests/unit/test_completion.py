"""Completion scripts, as a shell runs them."""

import shutil
import subprocess
import sys

import pytest

from kvlease import cli


def candidates(script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n_kvlease\necho "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.split()


@pytest.fixture(scope="module")
def bash() -> str:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    return subprocess.run(
        [sys.executable, "-m", "kvlease.cli", "completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_every_command_is_offered(bash: str) -> None:
    assert set(cli.COMMANDS) <= set(candidates(bash, "kvlease", ""))


def test_verbs_flags_and_values_are_offered(bash: str) -> None:
    assert candidates(bash, "kvlease", "leases", "re") == ["release"]
    assert candidates(bash, "kvlease", "leases", "release", "--reg") == ["--registry"]
    assert candidates(bash, "kvlease", "engines", "--output", "") == ["table", "json"]
    assert candidates(bash, "kvlease", "router", "--grpc") == ["--grpc-listen"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_have_a_script_with_every_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=script, text=True, timeout=20, check=True)
