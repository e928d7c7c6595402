"""A router's table of conversations on a clock that the test moves."""

import json
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvlease.core.conversation import Reply, tenant_digest
from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole, KvLayout
from kvlease.core.renewal import RenewalPolicy, RenewalTable
from kvlease.core.signals import LeaseSignal, PlanReason
from kvlease.router.bodies import TurnRequest, parse_turn
from kvlease.router.conversation import OpenTurn
from kvlease.router.conversations import ConversationTable
from kvlease.router.dialect import Api
from kvlease.router.engines import EngineTable
from kvlease.store.port import Batch, Change
from kvlease.testing.clock import ManualClock

TENANT = tenant_digest("key")
HOLDER = Holder("d", "boot", 1)
ENGINE = Engine(HOLDER, EngineRole.DECODE, "m", "http://d", "s:1", KvLayout(16, "f", 1, 1, 1, "layout"))
USER = {"role": "user", "content": "hello there"}
NEXT = [USER, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "0123456789"}]


class CountingRandom:
    def __init__(self) -> None:
        self._numbers = count(1)

    def lease_id(self) -> int:
        return next(self._numbers)

    def text_id(self) -> str:
        return f"{next(self._numbers):032x}"


def request(messages: list[dict[str, Any]], conversation_id: str = "", model: str = "m") -> TurnRequest:
    body = {"model": model, "messages": messages, "conversation_id": conversation_id}
    return parse_turn(Api.CHAT, json.dumps(body).encode(), TENANT)


@dataclass
class World:
    clock: ManualClock = field(default_factory=ManualClock)
    renewals: RenewalTable = field(default_factory=lambda: RenewalTable(RenewalPolicy()))
    engines: EngineTable = field(init=False)
    table: ConversationTable = field(init=False)

    def __post_init__(self) -> None:
        self.engines = EngineTable(self.clock, suspect_s=2.0)
        self.engines.apply(Batch((Change(ENGINE),), snapshot=True))
        self.table = ConversationTable(self.clock, self.renewals, self.engines, CountingRandom(), 3)

    def finish(self, turn: OpenTurn, lease_id: int) -> None:
        assert self.table.grant(turn, lease_id, HOLDER, Reply("fine")) is None
        self.table.close(turn)

    def signal(self, turn: OpenTurn) -> LeaseSignal | PlanReason:
        return self.table.lease_signal(turn)
