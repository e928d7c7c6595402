"""Which store a process uses, as a part of its configuration."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvlease.core.errors import InvalidArgument
from kvlease.runtime.config import ConfigError, require, setting
from kvlease.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsSettings
from kvlease.store.etcd import EtcdStore
from kvlease.store.etcd_client import EtcdOptions, parse_endpoints
from kvlease.store.memory import MemoryStore
from kvlease.store.port import Store, StoreKind

_log = logging.getLogger(__name__)


class OwnedStore(Store, Protocol):
    """A store that its process closes."""

    async def close(self) -> None:
        """Closes the way to what is stored."""
        ...


@dataclass(frozen=True)
class StoreSettings(TlsSettings):
    """Settings of a process that uses a store."""

    store: StoreKind = setting(
        StoreKind.ETCD, "where engines and lease records are remembered; memory: by this process alone"
    )
    store_call_s: float = setting(1.0, "bound of one call to the store")
    etcd_endpoints: str = setting(
        "127.0.0.1:2379",
        "host:port of etcd's members, separated by commas; with https:// before them the files of tls_dir are "
        "used unless the ones below are named",
    )
    etcd_ca_file: str = setting(
        "", "certificates that etcd's are checked against; empty: no TLS, or that of tls_dir (see above)"
    )
    etcd_certificate_file: str = setting("", "own certificate for etcd, where it asks for one")
    etcd_key_file: str = setting("", "key of that certificate")
    etcd_user: str = setting("", "user of etcd; empty: etcd asks for none")
    etcd_password_file: str = setting("", "file with that user's password, read for each login")
    etcd_accept_old: bool = setting(
        False, "accept an etcd in which a renewal can succeed for a revoked lease"
    )

    def validate_store(self) -> None:
        """Checks relations between settings of the store.

        Raises:
            ConfigError: one is broken.
        """
        try:
            endpoints = parse_endpoints(self.etcd_endpoints)
        except InvalidArgument as error:
            raise ConfigError(f"etcd_endpoints: {error}") from error
        require(bool(endpoints), "etcd_endpoints must name at least one host:port")
        for first, second in (
            ("etcd_certificate_file", "etcd_key_file"),
            ("etcd_user", "etcd_password_file"),
        ):
            values = (getattr(self, first), getattr(self, second))
            require(
                bool(values[0]) == bool(values[1]),
                f"{first} ({values[0]!r}) and {second} ({values[1]!r}) belong together",
            )
        secure = "https://" in self.etcd_endpoints
        require(
            not secure or bool(self.etcd_ca_file or self.tls_dir),
            f"etcd_endpoints ({self.etcd_endpoints!r}) needs etcd_ca_file ({self.etcd_ca_file!r}) or tls_dir "
            f"({self.tls_dir!r})",
        )
        require(
            bool(self.etcd_ca_file) or not self.etcd_certificate_file,
            f"etcd_certificate_file ({self.etcd_certificate_file!r}) needs etcd_ca_file ({self.etcd_ca_file!r})",
        )


def make_store(settings: StoreSettings) -> OwnedStore:
    """The store that the settings name.

    Raises:
        InvalidArgument: a certificate cannot be read.
    """
    if settings.store is StoreKind.ETCD:
        ca_file, certificate_file, key_file = _etcd_certificates(settings)
        return EtcdStore(
            EtcdOptions(
                endpoints=parse_endpoints(settings.etcd_endpoints),
                call_s=settings.store_call_s,
                ca_file=ca_file,
                certificate_file=certificate_file,
                key_file=key_file,
                user=settings.etcd_user,
                password_file=settings.etcd_password_file,
                accept_old=settings.etcd_accept_old,
            )
        )
    _log.warning(
        "the memory store lives in this one process: no other process sees what it remembers. "
        "Use --store etcd, or `kvlease dev`, which runs registry, router and sidecars in one process"
    )
    return MemoryStore()


def _etcd_certificates(settings: StoreSettings) -> tuple[str, str, str]:
    """Authority, certificate and key for etcd: its own, those of `tls_dir`, or none."""
    if settings.etcd_ca_file or "https://" not in settings.etcd_endpoints:
        return settings.etcd_ca_file, settings.etcd_certificate_file, settings.etcd_key_file
    directory = Path(settings.tls_dir)
    return str(directory / CA_FILE), str(directory / CERTIFICATE_FILE), str(directory / KEY_FILE)
