"""What a router tells an engine's connector about one leg of a turn, and what it hears back.

Both ride in `kv_transfer_params` under the key `kvlease`; clients neither send nor see them.
"""

from collections.abc import Mapping
from typing import Any, cast

from kvlease.core.errors import InvalidArgument
from kvlease.core.ids import Holder, lease_id_from_hex, lease_id_to_hex
from kvlease.core.lease import LeaseKind
from kvlease.core.values import value

PARAMS_KEY = "kvlease"
PARAMS_VERSION = 1
CHAIN_KEYS_MAX = 16
COUNT_LIMIT = 1 << 63


@value
class ReadOrder:
    """Which lease the engine reads before it computes.

    Attributes:
        pin_id: names the pin at the holder; the engine takes it again with a read part.
        sidecar_address: host:port of the holder's sidecar.
    """

    lease_id: int
    pin_id: str
    kind: LeaseKind
    holder: Holder
    sidecar_address: str


@value
class KeepOrder:
    """Which lease the engine grants when the leg has finished.

    Attributes:
        duration_s: seconds of a provisional CONVERSATION grant, or of the reservation of a TRANSFER's pin.
        pin_id: the pin under which a TRANSFER lease is granted; empty for a CONVERSATION.
        supersedes: lease of the conversation's previous turn, 0 when there is none.
    """

    lease_id: int
    kind: LeaseKind
    duration_s: float
    pin_id: str = ""
    conversation_key: bytes = b""
    chain_keys: tuple[int, ...] = ()
    supersedes: int = 0


@value
class TurnParams:
    """The connector's orders for one leg. `tenant` is the hex digest that roots the block digests."""

    tenant: str
    read: ReadOrder | None = None
    keep: KeepOrder | None = None

    def to_json(self) -> dict[str, Any]:
        """The value under `kv_transfer_params.kvlease`."""
        body: dict[str, Any] = {"version": PARAMS_VERSION, "tenant": self.tenant}
        if self.read is not None:
            body["read"] = {
                "lease_id": lease_id_to_hex(self.read.lease_id),
                "pin_id": self.read.pin_id,
                "kind": self.read.kind.value,
                "engine_id": self.read.holder.engine_id,
                "boot_id": self.read.holder.boot_id,
                "epoch": self.read.holder.epoch,
                "sidecar_address": self.read.sidecar_address,
            }
        if self.keep is not None:
            body["keep"] = {
                "lease_id": lease_id_to_hex(self.keep.lease_id),
                "kind": self.keep.kind.value,
                "duration_s": self.keep.duration_s,
                "pin_id": self.keep.pin_id,
                "conversation_key": self.keep.conversation_key.hex(),
                "chain_keys": [lease_id_to_hex(key) for key in self.keep.chain_keys],
                "supersedes": lease_id_to_hex(self.keep.supersedes) if self.keep.supersedes else "",
            }
        return body

    @staticmethod
    def from_json(value: object) -> "TurnParams":
        """Reads what a router wrote.

        Raises:
            InvalidArgument: a key is missing, has the wrong type or another version; nothing is used then.
        """
        body = _mapping(value)
        if _count(body, "version") != PARAMS_VERSION:
            raise InvalidArgument(f"kvlease parameters have another version than {PARAMS_VERSION}")
        read, keep = body.get("read"), body.get("keep")
        return TurnParams(
            tenant=_text(body, "tenant"),
            read=None if read is None else _read_order(_mapping(read)),
            keep=None if keep is None else _keep_order(_mapping(keep)),
        )


OUTCOMES: Mapping[str, str] = {
    "none": "no READ was ordered, or the engine can neither read nor retain",
    "read": "the lease was READ, and its tokens were used",
    "local": "the engine's own cache held all of the lease that belongs to the prompt",
    "below_threshold": "what the lease adds is less than is worth a READ",
    "mismatch": "nothing of the lease belongs to the prompt, or its KV lies in another layout",
    "failed": "the transfer failed, or its pin was lost before it began: recomputed",
    "fence": "the transfer was not seen done before its fence: given up and recomputed",
    "lost": "this engine's caches were cleared before the READ began (also the holder's miss of that name)",
    "unused": "the request ended, or was computed, before its READ could begin",
    "skipped": "the request asked not to read any cache",
}
"""What a connector reports besides the values of `MissReason` (`unreachable` also: no answer in time)."""


@value
class TurnReport:
    """What the connector did, in the engine's response.

    Attributes:
        prompt_tokens: tokens of the prompt.
        local_tokens: tokens that the engine's own prefix cache held.
        read_tokens: tokens that were READ and used.
        verified_tokens: tokens of the lease that belong to the prompt.
        outcome: what became of the READ; see `OUTCOMES`, or a `MissReason` value when the pin was refused.
        kept_tokens: tokens of the lease that was granted, 0 without one.
        read_s: from the READ's posting until it was seen done, 0 without one.
    """

    prompt_tokens: int
    local_tokens: int
    read_tokens: int
    verified_tokens: int
    outcome: str
    kept_tokens: int = 0
    read_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The value under `kv_transfer_params.kvlease` of a response."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "local_tokens": self.local_tokens,
            "read_tokens": self.read_tokens,
            "verified_tokens": self.verified_tokens,
            "outcome": self.outcome,
            "kept_tokens": self.kept_tokens,
            "read_s": self.read_s,
        }

    @staticmethod
    def from_json(value: object) -> "TurnReport":
        """Reads what a connector wrote.

        Raises:
            InvalidArgument: a key is missing or has the wrong type.
        """
        body = _mapping(value)
        return TurnReport(
            prompt_tokens=_count(body, "prompt_tokens"),
            local_tokens=_count(body, "local_tokens"),
            read_tokens=_count(body, "read_tokens"),
            verified_tokens=_count(body, "verified_tokens"),
            outcome=_text(body, "outcome"),
            kept_tokens=_count(body, "kept_tokens"),
            read_s=_seconds(body, "read_s") if body.get("read_s") else 0.0,
        )


def _read_order(body: Mapping[str, Any]) -> ReadOrder:
    return ReadOrder(
        lease_id=lease_id_from_hex(_text(body, "lease_id")),
        pin_id=_filled(body, "pin_id"),
        kind=_kind(body),
        holder=Holder(_filled(body, "engine_id"), _filled(body, "boot_id"), _count(body, "epoch")),
        sidecar_address=_filled(body, "sidecar_address"),
    )


def _keep_order(body: Mapping[str, Any]) -> KeepOrder:
    kind = _kind(body)
    pin_id = _text(body, "pin_id")
    if (kind is LeaseKind.TRANSFER) != bool(pin_id):
        raise InvalidArgument("a TRANSFER lease is kept under a pin id, and no other is")
    supersedes = _text(body, "supersedes")
    return KeepOrder(
        lease_id=lease_id_from_hex(_text(body, "lease_id")),
        kind=kind,
        duration_s=_seconds(body, "duration_s"),
        pin_id=pin_id,
        conversation_key=_hex(body, "conversation_key"),
        chain_keys=_chain_keys(body),
        supersedes=lease_id_from_hex(supersedes) if supersedes else 0,
    )


def _chain_keys(body: Mapping[str, Any]) -> tuple[int, ...]:
    value = body.get("chain_keys")
    if not isinstance(value, list) or len(keys := cast(list[object], value)) > CHAIN_KEYS_MAX:
        raise InvalidArgument(f"chain_keys is a list of at most {CHAIN_KEYS_MAX} ids in hex")
    return tuple(_chain_key(key) for key in keys)


def _chain_key(value: object) -> int:
    if not isinstance(value, str):
        raise InvalidArgument("a chain key is 16 hex digits")
    return lease_id_from_hex(value)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("kvlease parameters are objects")
    return cast(dict[str, Any], value)


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or len(value) > 512 or not _is_unicode(value):
        raise InvalidArgument(f"{key} is a string of at most 512 characters")
    return value


def _is_unicode(value: str) -> bool:
    """False for lone surrogates: JSON can hold them, protobuf and UTF-8 cannot."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _filled(body: Mapping[str, Any], key: str) -> str:
    value = _text(body, key)
    if not value:
        raise InvalidArgument(f"{key} must not be empty")
    return value


def _count(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if type(value) is not int or not 0 <= value < COUNT_LIMIT:
        raise InvalidArgument(f"{key} is a whole number of at least 0 and below 2**63")
    return value


def _seconds(body: Mapping[str, Any], key: str) -> float:
    value = body.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 86_400:
        raise InvalidArgument(f"{key} is a number of seconds above 0 and below a day")
    return float(value)


def _hex(body: Mapping[str, Any], key: str) -> bytes:
    try:
        return bytes.fromhex(_text(body, key))
    except ValueError as error:
        raise InvalidArgument(f"{key} is hex") from error


def _kind(body: Mapping[str, Any]) -> LeaseKind:
    try:
        return LeaseKind(_text(body, "kind"))
    except ValueError as error:
        raise InvalidArgument("kind is conversation or transfer") from error
