"""The pages of docs/ that are generated: from the configuration classes and from the .proto files."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvlease.core.signals import PlanReason
from kvlease.v1 import errors_pb2
from kvlease.wire.errors import ERRORS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_pages_are_what_make_docs_writes(generate: ModuleType) -> None:
    stale = [page.name for page, text in generate.pages().items() if page.read_text() != text]
    assert stale == [], "run `make docs`"


def test_a_page_keeps_what_is_outside_its_markers(generate: ModuleType) -> None:
    page = f"head\n{generate.BEGIN}\nold\n{generate.END}\ntail\n"
    written: str = generate.rewrite(page, "table\n")
    assert written == f"head\n{generate.BEGIN}\n\ntable\n\n{generate.END}\ntail\n"
    for broken in ("no marker", page + page, f"{generate.END}{generate.BEGIN}"):
        with pytest.raises(ValueError, match="marker"):
            generate.rewrite(broken, "")


def test_every_setting_and_every_call_has_its_row(generate: ModuleType) -> None:
    assert "| `socket_dir` | str | required |" in generate.configuration()
    assert (
        "| `retention_budget` | float | `0.5` | fraction of the engine's blocks" in generate.configuration()
    )
    assert "| `store` | `memory` or `etcd` | `etcd` |" in generate.configuration()
    api: str = generate.grpc_api()
    assert "| `RenewLeases` | stream of `RenewLeasesRequest` → stream of `RenewLeasesResponse` |" in api
    assert "| 8 | `counters` | map of string to uint64 |" in api
    assert "| 2 | `offer` | LeaseOffer (one of `message`) |" in api


def test_the_table_of_errors_names_every_reason_under_its_status() -> None:
    page = (DOCS / "api.md").read_text()
    rows = {
        line.split("|")[1].strip(" `"): line
        for line in page.splitlines()
        if line.startswith("| `") and "→" not in line
    }
    for row in ERRORS.values():
        reason = errors_pb2.ErrorReason.Name(row.reason).removeprefix("ERROR_REASON_")
        assert f"`{reason}`" in rows[row.status.name]


def test_operations_says_of_every_reason_what_it_means() -> None:
    page = (DOCS / "operations.md").read_text()
    assert [reason.value for reason in PlanReason if f"`{reason.value}`" not in page] == []
