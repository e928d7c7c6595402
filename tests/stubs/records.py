"""Engines and lease records for tests of stores."""

from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.records import Engine, EngineRole, KvLayout, LeaseRecord


def engine(engine_id: str = "engine-1", boot_id: str = "boot-1", epoch: int = 0) -> Engine:
    return Engine(
        holder=Holder(engine_id, boot_id, epoch),
        role=EngineRole.DECODE,
        model="m",
        url="http://127.0.0.1:8000",
        sidecar_address="127.0.0.1:9000",
        layout=KvLayout(32, "float32", 1, 1, 4096, "layout"),
    )


def lease(
    lease_id: int, conversation: bytes = b"c", tenant: str = "t", engine_id: str = "engine-1"
) -> LeaseRecord:
    return LeaseRecord(
        lease_id=lease_id,
        kind=LeaseKind.CONVERSATION,
        state=LeaseState.HELD,
        holder=Holder(engine_id, "boot-1"),
        tenant=tenant,
        conversation_key=conversation,
        tokens=64,
    )
