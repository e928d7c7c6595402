"""What a router takes anew while it runs: keys and rules of reuse, when their file changes
or on SIGHUP, and limits on SIGHUP."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from kvlease.core.errors import InvalidArgument
from kvlease.core.reuse_rules import ReuseRule, ReuseRules, parse_rules
from kvlease.router.config import RELOADED_SETTINGS, RouterConfig
from kvlease.router.tenancy import (
    KeyFile,
    Tenancy,
    TenancyByCredential,
    TenancyByGateway,
    TenancyByKeyFile,
    parse_key_file,
    parse_networks,
)
from kvlease.router.turn import TurnLimits

log = logging.getLogger(__name__)
Signature = tuple[int, int, int]
Parsed = TypeVar("Parsed")


def make_tenancy(config: RouterConfig) -> Tenancy:
    """Whom requests belong to, as configured.

    Raises:
        InvalidArgument: the keys file cannot be read, or makes no sense.
    """
    if config.keys_file:
        return TenancyByKeyFile(read_key_file(Path(config.keys_file)))
    if config.tenant_header:
        return TenancyByGateway(config.tenant_header, parse_networks(config.tenant_header_networks))
    return TenancyByCredential()


def make_reuse_rules(config: RouterConfig) -> ReuseRules:
    """For whom KV is reused, as configured.

    Raises:
        InvalidArgument: the file of rules cannot be read, or makes no sense.
    """
    return ReuseRules(config.reuse, read_rules(Path(config.reuse_file)) if config.reuse_file else ())


def read_key_file(path: Path) -> KeyFile:
    """The keys of a file.

    Raises:
        InvalidArgument: it cannot be read, or makes no sense.
    """
    return _parsed(path, parse_key_file)


def read_rules(path: Path) -> tuple[ReuseRule, ...]:
    """The rules of reuse of a file.

    Raises:
        InvalidArgument: it cannot be read, or makes no sense.
    """
    return _parsed(path, parse_rules)


class WatchedFile:
    """A file that is loaded again when it has changed; one that makes no sense changes nothing.

    Args:
        load: takes the file in; raises `InvalidArgument`.
    """

    def __init__(self, path: Path, load: Callable[[Path], None]) -> None:
        self._path = path
        self._load = load
        self._read = _signature(path)

    def look(self) -> None:
        """Loads the file if it has changed."""
        if _signature(self._path) != self._read:
            self.load()

    def load(self) -> None:
        """Loads the file."""
        # Taken before the file is read: a change in between is seen at the next look.
        self._read = _signature(self._path)
        try:
            self._load(self._path)
        except InvalidArgument as error:
            log.error("the file stays as it was read before", extra={"reason": str(error)})
            return
        log.info("file loaded", extra={"file": str(self._path)})


class Reloader:
    """Applies what changed; what makes no sense changes nothing and is logged."""

    def __init__(self, config: RouterConfig, limits: TurnLimits, tenancy: Tenancy, reuse: ReuseRules) -> None:
        self._config = config
        self._limits = limits
        self._files: list[WatchedFile] = []
        if isinstance(tenancy, TenancyByKeyFile):
            keys = tenancy
            self._files.append(
                WatchedFile(Path(config.keys_file), lambda path: keys.load(read_key_file(path)))
            )
        if config.reuse_file:
            self._files.append(
                WatchedFile(Path(config.reuse_file), lambda path: reuse.load(read_rules(path)))
            )

    def reload(self, config: RouterConfig) -> None:
        """Takes the limits of a configuration, and the files. Says which of its other changes need a restart."""
        self._limits.take(config.turn_limits())
        changed = [
            field.name
            for field in fields(config)
            if getattr(config, field.name) != getattr(self._config, field.name)
        ]
        pending = [name for name in changed if name not in RELOADED_SETTINGS]
        log.info("reloaded", extra={"changed": changed, "after_restart": pending})
        for file in self._files:
            file.load()

    async def watch_files(self) -> None:
        """Loads files whenever they were changed; until cancelled, or at once when there are none."""
        while self._files:
            await asyncio.sleep(self._config.keys_poll_s)
            for file in self._files:
                file.look()


def _parsed(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {type(error).__name__}") from error
    try:
        return parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(f"{path}: nested too deeply") from error


def _signature(path: Path) -> Signature | None:
    """What changes with a file, None while there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
