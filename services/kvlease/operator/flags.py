"""Flags of the operator's commands; what makes no sense is refused with what is wanted in its place."""

import os
from argparse import ArgumentParser, ArgumentTypeError

from kvlease.core.errors import InvalidArgument
from kvlease.core.ids import lease_id_from_hex
from kvlease.operator.command import Output
from kvlease.runtime.addresses import is_base_url, is_host_port

DEFAULT_REGISTRY = "127.0.0.1:7700"
DEFAULT_ROUTING = "127.0.0.1:7710"


def add_common_flags(parser: ArgumentParser) -> None:
    """Adds `--output`, `--timeout-s` and `--tls-dir`."""
    parser.add_argument(
        "--output",
        type=Output,
        choices=tuple(Output),
        default=Output.TABLE,
        metavar="table|json",
        help="how to print what was found (default: table)",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long each call may take (default: 5)",
    )
    parser.add_argument(
        "--tls-dir",
        default=os.environ.get("KVLEASE_TLS_DIR", ""),
        metavar="DIRECTORY",
        help="directory with ca.crt, tls.crt and tls.key of an operator, for processes that speak TLS "
        "(default: KVLEASE_TLS_DIR, else no TLS)",
    )


def add_registry_flag(parser: ArgumentParser) -> None:
    """Adds `--registry`."""
    parser.add_argument(
        "--registry",
        type=host_port,
        default=os.environ.get("KVLEASE_REGISTRY", DEFAULT_REGISTRY),
        metavar="HOST:PORT",
        help=f"a registry (default: KVLEASE_REGISTRY, else {DEFAULT_REGISTRY})",
    )


def add_routing_flag(parser: ArgumentParser) -> None:
    """Adds `--routing`."""
    parser.add_argument(
        "--routing",
        type=host_port,
        default=os.environ.get("KVLEASE_ROUTING", DEFAULT_ROUTING),
        metavar="HOST:PORT",
        help=f"a router's gRPC address (default: KVLEASE_ROUTING, else {DEFAULT_ROUTING})",
    )


def host_port(text: str) -> str:
    """A gRPC address as a flag: `host:port`, or `[address]:port` for IPv6.

    Raises:
        ArgumentTypeError: it is something else, as a URL is.
    """
    host, _, port = text.rpartition(":")
    plain = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if not is_host_port(text) or not host or not plain or int(port) == 0:
        kind = "a URL" if "://" in text else "no address"
        raise ArgumentTypeError(f"{text!r} is {kind}, but must be host:port, as 127.0.0.1:7700 is")
    return text


def base_url(text: str) -> str:
    """The base of an HTTP API as a flag: `http://host:port` or `https://…`, without the slash at its end.

    Raises:
        ArgumentTypeError: it is something else, as host:port is.
    """
    if not is_base_url(text):
        raise ArgumentTypeError(f"{text!r} is no base URL: it must be one as http://127.0.0.1:8000 is")
    return text.rstrip("/")


def seconds(text: str) -> float:
    """A duration as a flag.

    Raises:
        ArgumentTypeError: it is no number above 0 and at most a day.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most 86400")
    return value


def count(text: str) -> int:
    """A number of things as a flag.

    Raises:
        ArgumentTypeError: it is no whole number from 1 on.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def lease_id(text: str) -> int:
    """A lease id as an argument.

    Raises:
        ArgumentTypeError: it is not 16 hex digits.
    """
    try:
        return lease_id_from_hex(text)
    except InvalidArgument as error:
        raise ArgumentTypeError(str(error)) from error
