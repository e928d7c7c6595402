"""Typed configuration: defaults, then a TOML file, then environment, then flags; the last one wins.

A process has one frozen dataclass whose fields are made by `setting`. Field `heartbeat_interval_s` of the
router is `heartbeat_interval_s` in the file that `--config` names, `KVLEASE_ROUTER_HEARTBEAT_INTERVAL_S` in
the environment and `--heartbeat-interval-s` as a flag. A key that no field knows is refused in all three. A
secret has no flag: every user of a machine can read the command lines of its processes. A method `validate`
checks the relations between fields with `require`.
"""

import dataclasses
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from kvlease.runtime.addresses import is_host_port

ENVIRONMENT_PREFIX = "KVLEASE"
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_PLAIN_KINDS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float)}
"""Kind of a setting -> kinds of the values in a file that it takes: a text that looks like a number is none."""


class ConfigError(ValueError):
    """The configuration makes no sense; the message names the key, and both values of a broken relation."""


class ProcessConfig(Protocol):
    """A process's configuration: a frozen dataclass of settings."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def validate(self) -> None:
        """Checks relations between fields.

        Raises:
            ConfigError: one is broken.
        """
        ...


Config = TypeVar("Config", bound=ProcessConfig)


def setting(default: Any, meaning: str, *, secret: bool = False) -> Any:
    """A field: its default, what it means and why that default; a secret is never printed."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "secret": secret})


def require(holds: bool, message: str) -> None:
    """Refuses a configuration whose relation does not hold.

    Raises:
        ConfigError: with the message, which names both values.
    """
    if not holds:
        raise ConfigError(message)


def require_host_port(name: str, address: str) -> None:
    """Refuses an address that is not `host:port`.

    Raises:
        ConfigError: it is something else, as a URL is.
    """
    require(is_host_port(address), f"{name} is {address!r}, but must be host:port")


def add_config_arguments(parser: ArgumentParser, config: type[ProcessConfig]) -> None:
    """Adds `--config` and a flag for every field that is no secret."""
    secrets = [field.name for field in dataclasses.fields(config) if field.metadata["secret"]]
    also = f" and {', '.join(secrets)}, which no flag sets" if secrets else ""
    parser.add_argument("--config", default=None, help=f"TOML file with any of the settings below{also}")
    for field in dataclasses.fields(config):
        if field.metadata["secret"]:
            continue
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"setting_{field.name}",
            default=None,
            metavar="VALUE",
            nargs="?" if field.type in (bool, "bool") else None,
            const="true" if field.type in (bool, "bool") else None,
            help=f"{field.metadata['meaning']} (default: {_shown(field.default)})".replace("%", "%%"),
        )


def load_config(
    config: type[Config], process: str, arguments: Namespace, environment: Mapping[str, str]
) -> Config:
    """The configuration of a process, validated.

    Args:
        config: the process's dataclass.
        process: its name, as in `KVLEASE_<PROCESS>_...`.
        arguments: what a parser with `add_config_arguments` parsed.
        environment: the environment.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, a broken relation, an unreadable file.
    """
    prefix = f"{ENVIRONMENT_PREFIX}_{process.upper()}_"
    given = {
        key.removeprefix(prefix).lower(): value
        for key, value in environment.items()
        if key.startswith(prefix) and key != f"{prefix}CONFIG"
    }
    path = arguments.config or environment.get(f"{prefix}CONFIG")
    flags = {
        name.removeprefix("setting_"): value
        for name, value in vars(arguments).items()
        if name.startswith("setting_") and value is not None
    }
    values: dict[str, Any] = {}
    for source, layer, kinds in (
        (path or "file", _read_file(path), True),
        (f"{prefix}*", given, False),
        ("flags", flags, False),
    ):
        values |= _typed(config, source, layer, has_kinds=kinds)
    loaded = config(**values)
    loaded.validate()
    return loaded


def describe_flags(arguments: Namespace, changed: Mapping[str, str]) -> list[str]:
    """The flags that parsed to `arguments`, for another process, with some settings changed."""
    given = {
        name.removeprefix("setting_"): str(value)
        for name, value in vars(arguments).items()
        if name.startswith("setting_") and value is not None
    }
    file = ["--config", arguments.config] if arguments.config else []
    return file + [
        part
        for name, value in {**given, **changed}.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]


def describe_config(config: ProcessConfig) -> dict[str, Any]:
    """Every setting and its value, for the log; secrets are redacted."""
    return {
        field.name: "<redacted>" if _is_hidden(config, field) else _shown(getattr(config, field.name))
        for field in dataclasses.fields(config)
    }


def _is_hidden(config: ProcessConfig, field: "dataclasses.Field[Any]") -> bool:
    return bool(field.metadata["secret"]) and bool(getattr(config, field.name))


def _shown(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _typed(
    config: type[ProcessConfig], source: str, layer: Mapping[str, Any], *, has_kinds: bool
) -> dict[str, Any]:
    """The values of a layer; one that has kinds of its own, as TOML has, must use the right ones."""
    types = get_type_hints(config)
    fields = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(layer) - fields)
    if unknown:
        known = ", ".join(sorted(fields))
        raise ConfigError(f"{source}: unknown setting {', '.join(unknown)}; known are {known}")
    return {name: _value(types[name], name, source, raw, has_kinds=has_kinds) for name, raw in layer.items()}


def _value(kind: Any, name: str, source: str, raw: Any, *, has_kinds: bool) -> Any:
    try:
        if has_kinds and kind in _PLAIN_KINDS and not isinstance(raw, _PLAIN_KINDS[kind]):
            raise TypeError("of another kind")
        return _converted(kind, raw)
    except (ValueError, TypeError) as error:
        allowed = kind.__name__
        if _is_enum(kind):
            allowed = f"one of {', '.join(str(member.value) for member in kind)}"
        raise ConfigError(f"{source}: {name} is {raw!r}, but must be {allowed}") from error


def _converted(kind: Any, raw: Any) -> Any:
    if kind is bool:
        return _boolean(raw)
    if kind in (int, float):
        if isinstance(raw, bool):
            raise TypeError("a truth value is no number")
        return kind(raw)
    if kind is str and not isinstance(raw, str):
        raise TypeError("not a text")
    return kind(raw)


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError("neither true nor false")
    return text in _TRUE


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
