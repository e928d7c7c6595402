"""Handshakes that no turn waits for, on vLLM's real worker bookkeeping."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from engine_harness import BLOCK, REMOTE, Harness, make_harness, make_request, read, turn
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvlease.core.attachment import Peer
from kvlease.core.ids import Holder
from kvlease.core.records import KvLocation
from kvlease_vllm.seams import has_background_handshake

AWAIT_S = 20.0
STRANGER = Peer(Holder("stranger", "boot"), KvLocation("host", 7))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return make_harness(monkeypatch)


@pytest.fixture
def begun(engine: Harness) -> list[tuple[Any, ...]]:
    """The handshakes that vLLM was asked for."""
    asked: list[tuple[Any, ...]] = []

    def ensure(*arguments: Any, **_: Any) -> "Future[Any]":
        asked.append(arguments)
        return Future()

    engine.ranks[0].worker._ensure_handshake = ensure  # type: ignore[method-assign]
    return asked


def half_of(engine: Harness) -> Any:
    return engine.ranks[0].connector._worker_half


def read_from(engine: Harness, holder: Holder) -> None:
    prompt = list(range(4 * BLOCK))
    engine.add(make_request("a", prompt, turn(read(pin_id="a"))))
    engine.answer(engine.pinned(prompt, holder=holder))
    engine.step()


def test_this_vllm_shakes_hands_without_a_request_that_waits(engine: Harness) -> None:
    assert has_background_handshake(NixlPullConnectorWorker.__new__(NixlPullConnectorWorker))
    assert not has_background_handshake(object())


def test_a_peer_is_shaken_hands_with_where_it_listens(engine: Harness, begun: list[tuple[Any, ...]]) -> None:
    assert half_of(engine).begin_handshake(STRANGER) is not None
    assert begun == [("stranger", "host", 7, 1)]


def test_a_handshake_begins_only_while_no_step_is_in_the_connector(
    engine: Harness, begun: list[tuple[Any, ...]]
) -> None:
    half = half_of(engine)
    other = threading.Thread(target=half.begin_handshake, args=(STRANGER,), daemon=True)
    worker = engine.ranks[0].worker
    during: list[int] = []

    def heartbeats(_: Any) -> None:
        if other.ident is None:
            other.start()
        other.join(0.2)
        during.append(len(begun))

    worker._send_heartbeats = heartbeats  # type: ignore[method-assign]
    engine.add(make_request("a", list(range(4 * BLOCK))))
    engine.step()
    other.join(AWAIT_S)
    assert during[0] == 0
    assert len(begun) == 1


def test_a_former_boot_is_left_to_the_read_that_may_wait_for_others(
    engine: Harness, begun: list[tuple[Any, ...]]
) -> None:
    half = half_of(engine)
    half.begin_handshake(Peer(REMOTE, KvLocation("host", 7)))
    again = Holder(REMOTE.engine_id, "another-boot")
    assert half.begin_handshake(Peer(again, KvLocation("host", 7))) is None
    assert len(begun) == 1
    read_from(engine, again)
    assert engine.ranks[0].worker.cleaned == [REMOTE.engine_id]
