"""The released protos of an earlier version, and a peer that speaks nothing else."""

from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stubs.forwarding import Forwarding

RELEASED = Path(__file__).resolve().parents[1] / "upgrade" / "v0_1.binpb"
SERVICES = ("RegistryService", "SidecarService", "ConnectorService", "RoutingService")


def earlier_files() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(RELEASED.read_bytes())


def earlier_pool() -> DescriptorPool:
    """The earlier protos, apart from those of this version."""
    pool = DescriptorPool()
    for file in earlier_files().file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool


class EarlierPeer(Forwarding):
    """All that passes is what an earlier version understands: of messages its fields, of calls its methods.

    Put between two parts of this version it makes either the earlier one for the other.

    Attributes:
        dropped: names of messages that had fields which the earlier version does not know.
    """

    def __init__(self, target: str) -> None:
        pool = earlier_pool()
        found = [pool.FindServiceByName(f"kvlease.v1.{name}") for name in SERVICES]  # type: ignore[no-untyped-call]
        self._methods: dict[str, MethodDescriptor] = {
            f"/{service.full_name}/{method.name}": method for service in found for method in service.methods
        }
        streams = {m.name for m in self._methods.values() if m.client_streaming or m.server_streaming}
        super().__init__(target, frozenset(streams))
        self.dropped: set[str] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method not in self._methods:
            return None
        return super().service(handler_call_details)

    def request(self, path: str, message: bytes) -> bytes:
        return self._understood(self._methods[path].input_type, message)

    def response(self, path: str, message: bytes) -> bytes:
        return self._understood(self._methods[path].output_type, message)

    def _understood(self, descriptor: Descriptor, message: bytes) -> bytes:
        parsed: Any = GetMessageClass(descriptor)()
        parsed.ParseFromString(message)
        before = parsed.ByteSize()
        parsed.DiscardUnknownFields()
        if parsed.ByteSize() != before:
            self.dropped.add(descriptor.name)
        return bytes(parsed.SerializeToString())


def filled(message: Message, depth: int = 3) -> Message:
    """The message with every field set to something that is not its default."""
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value["key"] = (
                7 if field.message_type.fields_by_name["value"].cpp_type != field.CPPTYPE_STRING else "v"
            )
        elif field.message_type is not None:
            if depth > 0:
                filled(value.add() if hasattr(value, "extend") else value, depth - 1)
        elif hasattr(value, "extend"):
            value.append(_scalar(field))
        else:
            setattr(message, field.name, _scalar(field))
    return message


def _scalar(field: Any) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        return b"bytes" if field.type == field.TYPE_BYTES else "text"
    if field.cpp_type == field.CPPTYPE_BOOL:
        return True
    return 1
