"""What a router takes anew while it runs: the keys file, when it changes or on SIGHUP, and limits on SIGHUP."""

import asyncio
import logging
from dataclasses import fields
from pathlib import Path

from kvlease.core.errors import InvalidArgument
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


def read_key_file(path: Path) -> KeyFile:
    """The keys of a file.

    Raises:
        InvalidArgument: it cannot be read, or makes no sense.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {type(error).__name__}") from error
    try:
        return parse_key_file(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


class Reloader:
    """Applies what changed; what makes no sense changes nothing and is logged."""

    def __init__(self, config: RouterConfig, limits: TurnLimits, tenancy: Tenancy) -> None:
        self._config = config
        self._limits = limits
        self._tenancy = tenancy
        self._read = _signature(Path(config.keys_file)) if config.keys_file else None

    def reload(self, config: RouterConfig) -> None:
        """Takes the limits of a configuration, and the keys. Says which of its other changes need a restart."""
        self._limits.take(config.turn_limits())
        changed = [
            field.name
            for field in fields(config)
            if getattr(config, field.name) != getattr(self._config, field.name)
        ]
        pending = [name for name in changed if name not in RELOADED_SETTINGS]
        log.info("reloaded", extra={"changed": changed, "after_restart": pending})
        self._load_keys()

    async def watch_keys(self) -> None:
        """Loads the keys file whenever it was changed; until cancelled."""
        while isinstance(self._tenancy, TenancyByKeyFile):
            await asyncio.sleep(self._config.keys_poll_s)
            if _signature(Path(self._config.keys_file)) != self._read:
                self._load_keys()

    def _load_keys(self) -> None:
        if not isinstance(self._tenancy, TenancyByKeyFile):
            return
        path = Path(self._config.keys_file)
        # Taken before the file is read: a change in between is seen at the next look.
        self._read = _signature(path)
        try:
            self._tenancy.load(read_key_file(path))
        except InvalidArgument as error:
            log.error("the keys file stays as it was read before", extra={"reason": str(error)})
            return
        log.info("keys loaded", extra={"file": str(path)})


def _signature(path: Path) -> Signature | None:
    """What changes with a file, None while there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
