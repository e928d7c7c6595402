"""Mutual TLS between the processes, with certificates that may be replaced while they serve.

One directory has `ca.crt` (what peers' certificates are checked against), `tls.crt` (own certificate and what
signed it) and `tls.key`: the names that cert-manager writes into a Kubernetes secret. It is looked at before
each handshake; files that do not fit together (an unfinished change) are left aside, and the pair that was read
before stays in use. A connection outlives the certificates that it began with.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from kvlease.core.errors import InvalidArgument
from kvlease.runtime.config import setting

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsSettings:
    """Settings of a process that may talk over TLS."""

    tls_dir: str = setting(
        "",
        "directory with ca.crt, tls.crt and tls.key for every hop of this process, looked at again whenever a "
        "connection begins; empty: no TLS, which suits loopback and networks that are trusted as a whole",
    )


Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """What a directory held at one moment. `stamp` differs after every change.

    Attributes:
        front: context of an HTTP server whose clients need no certificate.
        inner: context of an HTTP server that refuses clients without one of the authority.
        client: context of HTTP clients.
    """

    stamp: Stamp
    authority: bytes
    certificate: bytes
    key: bytes
    front: ssl.SSLContext
    inner: ssl.SSLContext
    client: ssl.SSLContext


class Tls:
    """The certificates of a directory, as credentials for gRPC and contexts for HTTP. Safe in any thread.

    Raises:
        InvalidArgument: a file cannot be read, or they do not fit together.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._lock = threading.Lock()
        try:
            self._seen: Stamp = self._stamp()
            self._current = self._read(self._seen)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(f"tls_dir: cannot use {directory}: {error}") from error

    def certificates(self) -> Certificates:
        """The newest ones that fit together."""
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp != self._seen:
                    self._seen = stamp
                    self._current = self._read(stamp)
                    _log.info("certificates were replaced", extra={"directory": str(self._directory)})
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "certificates cannot be used, the ones before stay in use",
                    extra={"directory": str(self._directory), "reason": str(error)},
                )
            return self._current

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server: every client must show a certificate that the authority signed."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), self._server_configuration, require_client_authentication=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel: they stay as they are, so a channel that should use newer ones is opened anew."""
        found = self.certificates()
        return grpc.ssl_channel_credentials(found.authority, found.key, found.certificate)

    def server_context(self, *, clients_have_certificates: bool) -> ssl.SSLContext:
        """For an HTTP server; `clients_have_certificates` refuses those without one that the authority signed."""

        def newest() -> ssl.SSLContext:
            found = self.certificates()
            return found.inner if clients_have_certificates else found.front

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = newest()

        # Called at the begin of each handshake, also when the client names no server.
        context = _server_context(self._directory, clients_have_certificates)
        context.sni_callback = choose
        return context

    def client_context(self) -> ssl.SSLContext:
        """For the next connection of an HTTP client, which shows its certificate where it is asked for one."""
        return self.certificates().client

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        found = self.certificates()
        return grpc.ssl_server_certificate_configuration(
            [(found.key, found.certificate)], root_certificates=found.authority
        )

    def _stamp(self) -> Stamp:
        statuses = ((self._directory / name).stat() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE))
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in statuses)

    def _read(self, stamp: Stamp) -> Certificates:
        authority, certificate, key = (
            (self._directory / name).read_bytes() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
        )
        client = ssl.create_default_context(cafile=str(self._directory / CA_FILE))
        client.load_cert_chain(self._directory / CERTIFICATE_FILE, self._directory / KEY_FILE)
        front = _server_context(self._directory, clients_have_certificates=False)
        inner = _server_context(self._directory, clients_have_certificates=True)
        return Certificates(stamp, authority, certificate, key, front, inner, client)


def make_tls(settings: TlsSettings) -> Tls | None:
    """The certificates that the settings name; None without TLS.

    Raises:
        InvalidArgument: they cannot be used.
    """
    return Tls(settings.tls_dir) if settings.tls_dir else None


def _server_context(directory: Path, clients_have_certificates: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(directory / CA_FILE))
    context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    context.verify_mode = ssl.CERT_REQUIRED if clients_have_certificates else ssl.CERT_NONE
    return context
