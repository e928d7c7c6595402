"""Stories of leases, a line per event: `time  event | what is so after it`. Each file in `scenarios/` is one.

They are told on the production holder, renewal table, registry session and READs, with one engine `e`, one router
and one reader on a clock that stands still between the lines. What is so: `1 held` (a lease's state), `freed 1`,
`miss REASON`, `1 believed held` (by the router), `x pinned`, `x read`, `x late` (a READ), `resync`. A line names what
matters; every block freed, every miss and every verdict on a READ must be named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.connector.fake_pool import FakePool

from kvlease.core.holding import Grant, HoldEvent, HoldLimits, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind, LeaseState, MissReason
from kvlease.core.records import KvLayout
from kvlease.core.renewal import Beat, RenewalPolicy, RenewalTable
from kvlease.core.turn import ReadOrder
from kvlease.registry.renewals import EngineDelta, Heartbeat, RenewalSession
from kvlease.testing.clock import ManualClock
from kvlease_vllm.holder import BlockHolder
from kvlease_vllm.reader import Read, Reads

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
LAYOUT = KvLayout(16, "float32", 1, 1, 64, "layout")
LIMITS = HoldLimits(reading_blocks_max=20, tenant_leases_max=3)
ALWAYS_TOLD = ("freed", "miss", "resync")
VERDICTS = ("read", "late")


@dataclass
class Story:
    """The world of one story, and what the last event did."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(0.0))
    boot: int = 1
    connected: bool = True
    said: list[str] = field(default_factory=list)
    states: dict[int, LeaseState] = field(default_factory=dict)
    router: RenewalTable = field(default_factory=lambda: RenewalTable(RenewalPolicy()))
    expected: list[int] = field(default_factory=list)
    session: RenewalSession = field(default_factory=lambda: RenewalSession(100))
    asks: list[tuple[int, PinAsk]] = field(default_factory=list)
    reading: dict[str, Read] = field(default_factory=dict)
    pool: FakePool = field(init=False)
    holder: BlockHolder = field(init=False)
    reads: Reads = field(init=False)

    def __post_init__(self) -> None:
        self._start_engine()
        self.reads = Reads(self._ask, self._unpin_order, 10.0, 10.0, 2.0, self.clock.now_s)

    def happen(self, now_s: float, words: list[str]) -> list[str]:
        """Lets one event happen; what is so after it."""
        self.clock.advance(now_s - self.clock.now_s())
        self.said = []
        self.settle()
        getattr(self, words[0])(*words[1:])
        self.settle()
        return [*self.said, *self._standing()]

    def settle(self) -> None:
        """What happens by itself at a moment: answers arrive, READs are given up, blocks go back."""
        asks, self.asks = self.asks, []
        for attempt_id, ask in asks:
            self.reads.answer(attempt_id, self.holder.pin(ask))
        self.said += [f"{late.order.pin_id} late" for late in self.reads.overdue()]
        self.holder.give_back()
        freed, self.pool.freed = self.pool.freed, []
        self.said += [f"freed {block_id}" for block_id in freed]

    def _standing(self) -> Iterator[str]:
        for offer in self.holder.offers(LAYOUT)[1]:
            self.states[offer.record.lease_id] = offer.record.state
        yield from (f"{lease_id} {state.value}" for lease_id, state in self.states.items())
        for lease_id in self.expected:
            yield f"{lease_id} believed {self.router.belief(self.clock.now_s(), lease_id).value}"
        yield from (f"{pin_id} {read.stage.value}" for pin_id, read in self.reading.items())

    # --- the holder -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time passes."""

    def grant(self, lease: str, *options: str) -> None:
        said = dict(zip(options[::2], options[1::2], strict=True))
        grant = _grant(
            int(lease),
            LeaseKind.CONVERSATION,
            said.get("on", lease),
            supersedes=int(said.get("over", 0)),
            tenant=said.get("of", ""),
        )
        if not self.holder.grant(grant, float(said["for"])):
            self.said.append("miss not granted")

    def transfer(self, lease: str, _under: str, pin: str, _for: str, duration: str) -> None:
        grant = _grant(int(lease), LeaseKind.TRANSFER, lease)
        assert self.holder.grant_transfer(grant, pin, float(duration))

    def renew(self, lease: str, _for: str, duration: str) -> None:
        self._note(self.holder.renew([int(lease)], float(duration), [], 0.0).get(int(lease)))

    def pin(self, lease: str, pin: str, part: str, duration: str) -> None:
        parts = {"reservation_s" if part == "reservation" else "read_part_s": float(duration)}
        answer = self.holder.pin(PinAsk(int(lease), pin, Holder("e", "boot-1"), "", **parts))
        self._note(answer if isinstance(answer, MissReason) else None)

    def unpin(self, lease: str, pin: str) -> None:
        self.holder.unpin(int(lease), pin)

    def release(self, lease: str) -> None:
        self._note(self.holder.end(int(lease), LeaseEvent.RELEASE))

    def order(self, *leases: str) -> None:
        """The sidecar's order of eviction."""
        self.holder.set_order([int(lease) for lease in leases])

    def press(self, blocks: str) -> None:
        """A request needs so many free blocks."""
        self.holder.make_free(int(blocks))

    def reset(self) -> None:
        self.pool.reset_prefix_cache()

    def die(self) -> None:
        """The engine process ends; another one starts in its place, with memory of its own."""
        for lease_id in [offer.record.lease_id for offer in self.holder.offers(LAYOUT)[1]]:
            self.holder.end(lease_id, LeaseEvent.LOSE_ENGINE)
        self.boot += 1
        self._start_engine()

    # --- the router and its registry ------------------------------------------------------------------

    def expect(self, lease: str) -> None:
        """The router saw the lease's turn end well."""
        self.expected.append(int(lease))
        self.router.expect(self.clock.now_s(), int(lease), "e")

    def beat(self, fate: str = "") -> None:
        """A heartbeat; it may get `lost`, or its ack may."""
        beat = self.router.beat(self.clock.now_s())
        if fate == "lost" or not self.connected:
            return
        if not self.session.apply(_heartbeat(beat)):
            self.said.append("resync")
            self.router.resync()
            return
        ids = self.session.engines().get("e")
        asked = list(ids.lease_ids) if ids is not None else []
        misses = self.holder.renew(asked, 20.0, [], 0.0)
        if fate != "unacked":
            self.router.ack(self.clock.now_s(), beat.sequence, misses)

    def restart(self, _registry: str) -> None:
        """The registry forgets every session."""
        self.session = RenewalSession(100)

    # --- the reader -----------------------------------------------------------------------------------

    def read(self, lease: str, pin: str) -> None:
        """A request arrives that is to READ the lease."""
        order = ReadOrder(int(lease), pin, LeaseKind.CONVERSATION, Holder("e", "boot-1"), "a:1")
        self.reads.begin(pin, order, "")
        read = self.reads.get(pin)
        assert read is not None
        self.reading[pin] = read

    def post(self, pin: str) -> None:
        """The engine begins to READ."""
        assert self.reads.post(self.reading[pin], (1,), 16)

    def done(self, pin: str) -> None:
        """The engine sees the READ ended."""
        read = self.reading[pin]
        accepted = self.reads.accept(read)
        self.reads.settle(read, "read" if accepted else "fence")
        self.said.append(f"{pin} {'read' if accepted else 'late'}")

    # --- the network ----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Nothing reaches the engine `e` any more."""
        self.connected = False

    def heal(self) -> None:
        self.connected = True

    # --- inside ---------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        self.pool = FakePool(21)
        me = Holder("e", f"boot-{self.boot}", 1)
        self.holder = BlockHolder(me, self.pool, LIMITS, 20, self._hear, self.clock.now_s)

    def _hear(self, events: list[HoldEvent]) -> None:
        self.states |= {event.lease_id: event.state for event in events}

    def _note(self, miss: MissReason | None) -> None:
        if miss is not None:
            self.said.append(f"miss {miss.value}")

    def _ask(self, attempt_id: int, ask: PinAsk, order: ReadOrder) -> bool:
        if self.connected:
            self.asks.append((attempt_id, ask))
        return True

    def _unpin_order(self, order: ReadOrder) -> None:
        if self.connected:
            self.holder.unpin(order.lease_id, order.pin_id)


def _heartbeat(beat: Beat) -> Heartbeat:
    engines = tuple(
        EngineDelta(engine_id, delta.added_lease_ids, delta.dropped_lease_ids)
        for engine_id, delta in beat.engines.items()
    )
    return Heartbeat("router", beat.epoch, beat.sequence, beat.full, engines, 20.0, 30.0)


def _grant(lease_id: int, kind: LeaseKind, blocks: str, supersedes: int = 0, tenant: str = "") -> Grant:
    first, _, last = blocks.partition("-")
    block_ids = tuple(range(int(first), int(last or first) + 1))
    digests = b"d" * 16 * len(block_ids)
    tokens = 16 * len(block_ids)
    return Grant(lease_id, kind, block_ids, digests, tokens, 16, tenant=tenant, supersedes=supersedes)


def must_be_told(said: str) -> bool:
    """Whether a story may not pass over it."""
    return said.startswith(ALWAYS_TOLD) or said.endswith(VERDICTS)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_told(path: Path) -> None:
    story = Story()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("#") or not line:
            continue
        event, _, expected = line.partition("|")
        now_s, *words = event.split()
        said = story.happen(float(now_s), words)
        told = {part.strip() for part in expected.split(",")} - {""}
        untold = {part for part in said if must_be_told(part)} - told
        where = f"{path.name}:{number}: {line}\nwhat is so: {', '.join(said)}"
        assert told <= set(said), f"{where}\nwhat is not: {', '.join(told - set(said))}"
        assert not untold, f"{where}\nwhat is not told: {', '.join(untold)}"


def test_a_story_that_is_not_so_fails_with_its_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("0 grant 1 for 20 | 1 held\n5 release 1 | 1 expired, freed 1\n")
    with pytest.raises(AssertionError, match=r"wrong.txt:2: 5 release 1 .*\n.*1 released"):
        test_the_story_goes_as_it_is_told(wrong)
