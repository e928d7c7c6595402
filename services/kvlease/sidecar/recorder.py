"""Keeps one engine's registration and lease records in the store what they should be.

Nobody waits for the store: callers change what should be there, one owner task makes it so, and whatever
could not be written is written later in its newest form. What waits is bounded by the engine's own leases.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvlease.core.clock import Clock
from kvlease.core.errors import EngineIdReused, StoreUnavailable
from kvlease.core.records import Engine, LeaseRecord
from kvlease.store.port import Recorded, Session, Store

Result = TypeVar("Result")

REMOVED_MAX = 500
"""Records removed by one call, which has to end within its deadline."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecorderTimes:
    """Bounds of a recorder, in seconds.

    Attributes:
        ttl_s: time to live of the engine's session; it is renewed three times within it.
        call_s: deadline of one call to the store.
        retry_s: pause after a call that failed.
        reconcile_s: between two comparisons of what is recorded with what should be.
    """

    ttl_s: float = 10.0
    call_s: float = 1.0
    retry_s: float = 0.5
    reconcile_s: float = 60.0


class EngineRecorder:
    """The store's side of one attached engine.

    Args:
        supersede: called with a lease of the same conversation that a recorded one replaced; must be bounded
            in time.
        refuse: called with the error when the store will never accept the engine.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        times: RecorderTimes,
        clock: Clock,
        supersede: Callable[[LeaseRecord], Awaitable[None]],
        refuse: Callable[[EngineIdReused], None],
    ) -> None:
        self._store = store
        self._engine = engine
        self._times = times
        self._clock = clock
        self._supersede = supersede
        self._refuse = refuse
        self._session: Session | None = None
        self._renewed_s = 0.0
        self._reconcile_due_s = 0.0
        self._wanted: dict[int, tuple[LeaseRecord, int]] = {}
        self._dirty: dict[int, None] = {}
        self._gone: dict[int, None] = {}
        self._engine_dirty = False
        self._silent = False
        self._changed = asyncio.Event()

    def set_engine(self, engine: Engine) -> None:
        """Wants the registration to be `engine`, the same process in another epoch, or draining."""
        self._engine = engine
        self._engine_dirty = True
        self._changed.set()

    def put(self, record: LeaseRecord, supersedes: int) -> None:
        """Wants a confirmed lease to be recorded."""
        self._wanted[record.lease_id] = (record, supersedes)
        self._dirty[record.lease_id] = None
        self._gone.pop(record.lease_id, None)
        self._changed.set()

    def remove(self, lease_id: int) -> None:
        """Wants no record of a lease."""
        if self._wanted.pop(lease_id, None) is not None:
            self._dirty.pop(lease_id, None)
            self._gone[lease_id] = None
            self._changed.set()

    async def open(self) -> None:
        """Registers the engine, unless the store does not answer: then `run` does it later.

        Raises:
            EngineIdReused: the engine id was seen under another boot id.
        """
        with suppress(StoreUnavailable):
            await self._open_session()

    async def run(self) -> None:
        """Makes it so, until cancelled or until the store refuses the engine."""
        while True:
            self._changed.clear()
            try:
                await self._write()
                self._tell_answered()
                due_s = min(self._renewed_s + self._times.ttl_s / 3, self._reconcile_due_s)
                pause_s = due_s - self._clock.now_s()
            except EngineIdReused as error:
                self._refuse(error)
                return
            except StoreUnavailable as error:
                self._tell_silent(error)
                await asyncio.sleep(self._times.retry_s)
                continue
            except Exception:
                # Without its recorder the engine would vanish from the fleet while its stream stands.
                _log.exception("writing to the store failed")
                await asyncio.sleep(self._times.retry_s)
                continue
            await self._changed_within(pause_s)

    async def end(self) -> None:
        """Removes the registration and all records in one event; a silent store does it by itself."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await self._bounded(session.end())
            except StoreUnavailable as error:
                _log.warning("the session could not be ended", extra=self._extra(error))

    async def _write(self) -> None:
        """One pass: session, registration, records."""
        if self._session is None:
            await self._open_session()
        session = self._session
        assert session is not None
        await self._renew_if_due(session)
        if self._engine_dirty:
            self._engine_dirty = False
            await self._retained(session.put_engine(self._engine), self._mark_engine)
        while self._gone:
            await self._remove(session, list(itertools.islice(self._gone, REMOVED_MAX)))
            await self._renew_if_due(session)
        while self._dirty:
            await self._write_lease(session, next(iter(self._dirty)))
            await self._renew_if_due(session)
        if self._clock.now_s() >= self._reconcile_due_s:
            await self._reconcile(session)

    async def _reconcile(self, session: Session) -> None:
        """Finds records that the engine does not stand for, and leases whose records are gone, as after a deletion.

        The next pass writes what is found. Nothing else writes for the session meanwhile.
        """
        recorded = await self._bounded(session.list_recorded())
        self._reconcile_due_s = self._clock.now_s() + self._times.reconcile_s
        ghosts = dict.fromkeys(recorded - self._wanted.keys())
        missing = dict.fromkeys(self._wanted.keys() - recorded)
        if ghosts or missing:
            _log.warning(
                "the store's records are put right",
                extra={
                    "engine_id": self._engine.holder.engine_id,
                    "ghosts": len(ghosts),
                    "missing": len(missing),
                },
            )
            self._gone |= ghosts
            self._dirty |= missing
            self._changed.set()

    async def _renew_if_due(self, session: Session) -> None:
        before_s = self._clock.now_s()
        if before_s >= self._renewed_s + self._times.ttl_s / 3:
            if not await self._bounded(session.renew()):
                self._session = None
                raise StoreUnavailable("the session is over")
            self._renewed_s = before_s

    async def _remove(self, session: Session, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            del self._gone[lease_id]
        await self._retained(
            session.remove_leases(lease_ids), lambda: self._gone.update(dict.fromkeys(lease_ids))
        )

    async def _write_lease(self, session: Session, lease_id: int) -> None:
        del self._dirty[lease_id]
        record, supersedes = self._wanted[lease_id]

        def mark() -> None:
            if lease_id in self._wanted:
                self._dirty[lease_id] = None

        recorded: Recorded = await self._retained(session.record_lease(record, supersedes), mark)
        if recorded.generation == 0:
            self._wanted.pop(lease_id, None)
            self._dirty.pop(lease_id, None)
            await self._supersede(record)
        elif recorded.superseded is not None:
            await self._supersede(recorded.superseded)

    async def _open_session(self) -> None:
        before_s = self._clock.now_s()
        self._session = await self._bounded(self._store.open_session(self._engine, self._times.ttl_s))
        self._renewed_s = before_s
        self._reconcile_due_s = before_s + self._times.reconcile_s
        self._engine_dirty = False
        self._dirty = dict.fromkeys(self._wanted)
        self._gone = {}

    async def _retained(self, call: Awaitable[Result], mark: Callable[[], None]) -> Result:
        try:
            return await self._bounded(call)
        except Exception:
            mark()
            raise

    def _tell_silent(self, error: StoreUnavailable) -> None:
        """Once per outage: it is tried again every `retry_s`."""
        if not self._silent:
            self._silent = True
            _log.warning("the store does not answer", extra=self._extra(error))

    def _tell_answered(self) -> None:
        if self._silent:
            self._silent = False
            _log.info("the store answers again", extra={"engine_id": self._engine.holder.engine_id})

    def _mark_engine(self) -> None:
        self._engine_dirty = True

    async def _bounded(self, call: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(self._times.call_s):
                return await call
        except TimeoutError as error:
            raise StoreUnavailable(f"no answer within {self._times.call_s:g} s") from error

    async def _changed_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _extra(self, error: Exception) -> dict[str, str]:
        return {"engine_id": self._engine.holder.engine_id, "reason": str(error)}
