"""Every domain error crosses with its status and reason, and comes back as itself."""

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvlease.core.errors import HolderUnreachable, KvleaseError, StoreUnavailable
from kvlease.v1 import errors_pb2
from kvlease.wire.errors import DETAILS_KEY, ERROR_DOMAIN, ERRORS, error_from_trailers, status_of


def subclasses(error: type[KvleaseError]) -> Iterator[type[KvleaseError]]:
    for child in error.__subclasses__():
        yield child
        yield from subclasses(child)


@pytest.mark.parametrize("error", sorted(subclasses(KvleaseError), key=lambda error: error.__name__))
def test_every_domain_error_crosses_and_comes_back_as_itself(error: type[KvleaseError]) -> None:
    trailers = [("other", "x"), (DETAILS_KEY, status_of(error("it failed")).SerializeToString())]
    back = error_from_trailers(trailers)
    assert type(back) is error
    assert str(back) == "it failed"


def test_every_reason_of_the_protocol_belongs_to_one_error() -> None:
    numbers = sorted(int(row.reason) for row in ERRORS.values())
    assert numbers == sorted(number for number in errors_pb2.ErrorReason.values() if number != 0)


def test_errors_that_a_repeat_can_help_say_when() -> None:
    for error, row in ERRORS.items():
        status = status_of(error("x"))
        retry = error_details_pb2.RetryInfo()
        hints = [detail for detail in status.details if detail.Is(retry.DESCRIPTOR)]
        assert len(hints) == (row.retry_after_s is not None)
    assert ERRORS[StoreUnavailable].retry_after_s is not None
    assert ERRORS[HolderUnreachable].retry_after_s is not None


def test_the_status_names_reason_and_domain() -> None:
    status = status_of(StoreUnavailable("no store"))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("STORE_UNAVAILABLE", ERROR_DOMAIN)
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]


def test_details_of_others_are_no_domain_error() -> None:
    status = status_pb2.Status(code=14)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="STORE_UNAVAILABLE", domain="elsewhere"))
    assert error_from_trailers([(DETAILS_KEY, status.SerializeToString())]) is None
    assert error_from_trailers([(DETAILS_KEY, b"\xff\xff")]) is None
    assert error_from_trailers([]) is None
