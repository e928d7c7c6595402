"""A collector in the test's own process: takes spans over OTLP/gRPC and keeps them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

SPANS_MAX = 10_000
WAIT_S = 20.0


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as a collector gets it; ids in hex, `parent_id` empty for a root.

    Attributes:
        service: `service.name` of whoever made it.
        links: ids of trace and span of each link.
        failed: its status is an error.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]
    links: tuple[tuple[str, str], ...] = ()
    failed: bool = False


class OtlpSink:
    """Serves `TraceService` on a free port; a context.

    Attributes:
        endpoint: for `otlp_endpoint`, once it was entered.
        spans: in the order in which they came, `SPANS_MAX` at most.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[ReceivedSpan] = []
        self._came = asyncio.Condition()
        self._server = grpc.aio.server()

    async def __aenter__(self) -> "OtlpSink":
        cast(Any, trace_service_pb2_grpc).add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def Export(self, request: Any, context: Any) -> Any:
        """Takes one batch."""
        received = [
            _received(span, _values(resource.resource.attributes).get("service.name", ""))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        async with self._came:
            self.spans.extend(received[: SPANS_MAX - len(self.spans)])
            self._came.notify_all()
        return cast(Any, trace_service_pb2).ExportTraceServiceResponse()

    async def until(self, condition: Callable[["OtlpSink"], object]) -> None:
        """Returns once the condition holds for what has come; fails with the names of what has."""
        try:
            async with asyncio.timeout(WAIT_S), self._came:
                await self._came.wait_for(lambda: condition(self))
        except TimeoutError as error:
            came = [f"{span.service}: {span.name}" for span in self.spans]
            raise AssertionError(f"not within {WAIT_S:g} s; what came: {came}") from error

    def named(self, name: str, service: str = "") -> list[ReceivedSpan]:
        """The spans of a name, of one service or of any."""
        return [span for span in self.spans if span.name == name and service in ("", span.service)]

    def edges(self, trace_id: str = "") -> set[tuple[str, str]]:
        """Every parent -> child pair, each as `service: name`, of one trace or of all."""
        by_id = {(span.trace_id, span.span_id): span for span in self.spans}
        pairs: set[tuple[str, str]] = set()
        for span in self.spans:
            parent = by_id.get((span.trace_id, span.parent_id))
            if parent is not None and trace_id in ("", span.trace_id):
                pairs.add((f"{parent.service}: {parent.name}", f"{span.service}: {span.name}"))
        return pairs


def _received(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        failed=span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
