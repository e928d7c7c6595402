"""Domain errors <-> gRPC status with `google.rpc.ErrorInfo` (and `RetryInfo` where a repeat can help).

Needs `googleapis-common-protos`, so only services import it, never the connector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvlease.core.errors import (
    EngineIdReused,
    HolderUnreachable,
    InvalidArgument,
    KvleaseError,
    NotAllowed,
    NotOwner,
    QuotaExceeded,
    StoreUnavailable,
    UnknownEngine,
    VersionMismatch,
)
from kvlease.v1 import errors_pb2
from kvlease.wire.values import duration_to_wire

ERROR_DOMAIN = "kvlease"
DETAILS_KEY = "grpc-status-details-bin"
_REASON_PREFIX = "ERROR_REASON_"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one domain error crosses.

    Attributes:
        retry_after_s: after which time a repeat may help; None when it cannot.
    """

    status: grpc.StatusCode
    reason: errors_pb2.ErrorReason
    retry_after_s: float | None = None


ERRORS: dict[type[KvleaseError], ErrorRow] = {
    InvalidArgument: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_ARGUMENT),
    UnknownEngine: ErrorRow(grpc.StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_UNKNOWN_ENGINE),
    EngineIdReused: ErrorRow(grpc.StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_ENGINE_ID_REUSED),
    NotOwner: ErrorRow(grpc.StatusCode.PERMISSION_DENIED, errors_pb2.ERROR_REASON_NOT_OWNER),
    NotAllowed: ErrorRow(grpc.StatusCode.PERMISSION_DENIED, errors_pb2.ERROR_REASON_NOT_ALLOWED),
    StoreUnavailable: ErrorRow(grpc.StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_STORE_UNAVAILABLE, 1.0),
    HolderUnreachable: ErrorRow(grpc.StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_HOLDER_UNREACHABLE, 1.0),
    QuotaExceeded: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_QUOTA_EXCEEDED, 1.0),
    VersionMismatch: ErrorRow(grpc.StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_VERSION_MISMATCH),
}
"""Every domain error, its status and its reason."""

_ERROR_OF = {errors_pb2.ErrorReason.Name(row.reason): error for error, row in ERRORS.items()}


class AbortableContext(Protocol):
    """The part of a server's call context that refuses the call."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        """Ends the call with a status."""
        ...


def status_of(error: KvleaseError) -> status_pb2.Status:
    """The rich status of a domain error."""
    row = ERRORS[type(error)]
    number: int = row.status.value[0]
    status = status_pb2.Status(code=number, message=str(error))
    name = errors_pb2.ErrorReason.Name(row.reason)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=name.removeprefix(_REASON_PREFIX), domain=ERROR_DOMAIN)
    )
    if row.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo(retry_delay=duration_to_wire(row.retry_after_s))
        status.details.add().Pack(retry)
    return status


async def abort_with(context: AbortableContext, error: KvleaseError) -> NoReturn:
    """Refuses a call with the status, the reason and the retry hint of a domain error."""
    details = ((DETAILS_KEY, status_of(error).SerializeToString()),)
    await context.abort(ERRORS[type(error)].status, str(error), details)


def error_from_trailers(trailers: Sequence[tuple[str, str | bytes]]) -> KvleaseError | None:
    """The domain error that a peer put into its trailing metadata, None when it put none there."""
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return _error_from_details(value)
    return None


def error_from_rpc(error: grpc.aio.AioRpcError) -> KvleaseError:
    """The domain error of a failed call; a peer that gave none, or is not there, is a `HolderUnreachable`.

    Only for calls to a sidecar or a registry, whose own failures all come with a reason.
    """
    trailers = [(str(key), value) for key, value in error.trailing_metadata() or ()]
    known = error_from_trailers(trailers)
    return known or HolderUnreachable(f"{error.code().name}: {error.details()}")


def _error_from_details(value: bytes) -> KvleaseError | None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(value)
    except DecodeError:
        return None
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            error = _ERROR_OF.get(_REASON_PREFIX + info.reason)
            return error(status.message) if error is not None else None
    return None
