"""Generates the Python packages of every .proto file below this folder.

The proto package is the Python package: `protos/kvlease/v1/lease.proto` becomes
`services/kvlease/v1/lease_pb2.py`, its typed stub and, for services, `lease_pb2_grpc.py` with a typed
stub of its own (protoc's has none). Hatchling runs it as a build hook; `python protos/hatch_build.py`
runs it alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REPOSITORY_ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = REPOSITORY_ROOT / "protos"
PYTHON_ROOT = REPOSITORY_ROOT / "services"


class GeneratedCodeHook(BuildHookInterface[Any]):
    """Generates before a wheel, an editable install or a source distribution is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates all packages and lists them as artifacts, since git ignores them."""
        packages = generate()
        build_data["artifacts"].extend(f"/{path.relative_to(REPOSITORY_ROOT)}/*" for path in packages)


def generate() -> list[Path]:
    """Returns the folders of the generated packages; raises RuntimeError when protoc refuses a file."""
    sources = sorted(PROTO_ROOT.rglob("*.proto"))
    if not sources:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        descriptor_file = Path(scratch) / "descriptors.pb"
        _run_protoc(sources, descriptor_file)
        described = FileDescriptorSet.FromString(descriptor_file.read_bytes())
    own_names = {source.relative_to(PROTO_ROOT).as_posix() for source in sources}
    types = {name: reference for file in described.file for name, reference in _messages(file)}
    for file in described.file:
        if file.name in own_names:
            _write_service_stub(file, types)
    packages = sorted({PYTHON_ROOT / source.relative_to(PROTO_ROOT).parent for source in sources})
    for package in packages:
        (package / "__init__.py").write_text('"""Generated from protos/; do not edit."""\n')
    return packages


def _run_protoc(sources: list[Path], descriptor_file: Path) -> None:
    import grpc_tools
    from grpc_tools import protoc

    include = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTO_ROOT}",
        f"-I{include}",
        f"--python_out={PYTHON_ROOT}",
        f"--pyi_out={PYTHON_ROOT}",
        f"--grpc_python_out={PYTHON_ROOT}",
        f"--descriptor_set_out={descriptor_file}",
        "--include_imports",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its message is above")


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (full proto name, (module, class)) of the top-level messages of one file."""
    module = file.name.removesuffix(".proto").replace("/", ".") + "_pb2"
    for message in file.message_type:
        yield f".{file.package}.{message.name}", (module, message.name)


def _write_service_stub(file: FileDescriptorProto, types: dict[str, tuple[str, str]]) -> None:
    """Writes `*_pb2_grpc.pyi`, or removes both gRPC modules of a file without services."""
    target = PYTHON_ROOT / (file.name.removesuffix(".proto") + "_pb2_grpc.pyi")
    if not file.service:
        target.unlink(missing_ok=True)
        target.with_suffix(".py").unlink(missing_ok=True)
        return
    used = {
        types[name][0]
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    }
    lines = [
        "# Generated from protos/; do not edit. Stubs are typed for channels of grpc.aio.",
        "from collections.abc import AsyncIterator, Awaitable, Iterator",
        "from typing import Any, TypeVar",
        "",
        "import grpc",
        "import grpc.aio",
        *(f"import {module}" for module in sorted(used)),
        "",
        '_T = TypeVar("_T")',
        "",
        "class _RequestIterator(AsyncIterator[_T], Iterator[_T]): ...  # type: ignore[misc]",
        "class _Context(grpc.aio.ServicerContext[Any, Any], grpc.ServicerContext): ...  # type: ignore[misc]",
    ]
    for service in file.service:
        lines += [
            "",
            f"class {service.name}Stub:",
            "    def __init__(self, channel: grpc.aio.Channel | grpc.Channel) -> None: ...",
        ]
        lines += [_stub_line(method, types) for method in service.method]
        lines += ["", f"class {service.name}Servicer:"]
        lines += [_servicer_line(method, types) for method in service.method]
        lines += [
            "",
            f"def add_{service.name}Servicer_to_server(",
            f"    servicer: {service.name}Servicer, server: grpc.aio.Server | grpc.Server",
            ") -> None: ...",
        ]
    target.write_text("\n".join(lines) + "\n")


def _reference(name: str, types: dict[str, tuple[str, str]]) -> str:
    return ".".join(types[name])


def _stub_line(method: MethodDescriptorProto, types: dict[str, tuple[str, str]]) -> str:
    shape = ("Stream" if method.client_streaming else "Unary") + (
        "Stream" if method.server_streaming else "Unary"
    )
    request, response = _reference(method.input_type, types), _reference(method.output_type, types)
    return f"    {method.name}: grpc.aio.{shape}MultiCallable[{request}, {response}]"


def _servicer_line(method: MethodDescriptorProto, types: dict[str, tuple[str, str]]) -> str:
    request, response = _reference(method.input_type, types), _reference(method.output_type, types)
    parameter = (
        f"request_iterator: _RequestIterator[{request}]" if method.client_streaming else f"request: {request}"
    )
    result = (
        f"AsyncIterator[{response}] | Iterator[{response}] | Awaitable[None]"
        if method.server_streaming
        else f"{response} | Awaitable[{response}]"
    )
    return f"    def {method.name}(self, {parameter}, context: _Context) -> {result}: ..."


if __name__ == "__main__":
    for generated in generate():
        print(f"generated {generated.relative_to(REPOSITORY_ROOT)}", file=sys.stderr)
