"""The service config that clients in every language load: deadlines and retries."""

import json
from pathlib import Path
from typing import Any

from kvlease.v1 import registry_pb2, routing_pb2

CONFIG = Path(__file__).resolve().parents[2] / "protos" / "kvlease" / "v1" / "service_config.json"
SERVICES = (
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
    routing_pb2.DESCRIPTOR.services_by_name["RoutingService"],
)


def test_every_call_that_ends_by_itself_has_a_deadline_and_is_tried_again() -> None:
    configured: dict[tuple[str, str], Any] = {
        (name["service"], name["method"]): method
        for method in json.loads(CONFIG.read_text())["methodConfig"]
        for name in method["name"]
    }
    unary = {
        (service.full_name, method.name)
        for service in SERVICES
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }
    assert set(configured) == unary
    for method in configured.values():
        assert method["timeout"] == "5s"
        assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
