"""The admin address of a process: its metrics over HTTP, apart from what clients and peers reach."""

import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from kvlease.core.errors import InvalidArgument
from kvlease.runtime.config import require_host_port, setting
from kvlease.runtime.http_log import server_logger
from kvlease.runtime.metrics import Metrics
from kvlease.runtime.tls import Tls

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class AdminSettings:
    """Settings of a process that has an admin address."""

    admin_listen: str = setting(
        "127.0.0.1:0",
        "host:port of GET /metrics, for Prometheus; port 0: any free one, told in the log at start, since several "
        "processes share a machine; over TLS it asks for a certificate",
    )
    admin_token_file: str = setting(
        "",
        "file with the token that callers of the admin address show as `Authorization: Bearer`, read for each "
        "of them; empty: none is asked for, which suits loopback and mutual TLS",
    )

    def validate_admin(self) -> None:
        """Checks the address.

        Raises:
            ConfigError: it is none.
        """
        require_host_port("admin_listen", self.admin_listen)


class AdminServer:
    """Serves one process's metrics. After `start`, `url` is the base of what it serves."""

    def __init__(self, settings: AdminSettings, metrics: Metrics, tls: Tls | None = None) -> None:
        self._listen = settings.admin_listen
        self._token_file = settings.admin_token_file
        self._metrics = metrics
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Begins to serve.

        Raises:
            InvalidArgument: the address cannot be bound, or there is no token to ask for.
        """
        if self._token_file and not self._token():
            raise InvalidArgument(f"admin_token_file: {self._token_file} cannot be read or is empty")
        app = web.Application()
        app.router.add_get("/metrics", self._scrape)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=server_logger)
        await runner.setup()
        self._runner = runner
        host, _, port = self._listen.rpartition(":")
        context = self._tls.server_context(clients_have_certificates=True) if self._tls is not None else None
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=context).start()
        except OSError as error:
            await self.stop()
            raise InvalidArgument(f"cannot listen on {self._listen}: {error}") from error
        self.url = _url(runner, context)

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _scrape(self, request: web.Request) -> web.Response:
        if self._token_file and not self._may_read(request.headers.get("Authorization", "")):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return web.Response(headers={"Content-Type": CONTENT_TYPE}, body=await self._metrics.exposition())

    def _may_read(self, authorization: str) -> bool:
        """Whether the header shows the token of the file; nobody's does while the file cannot be read."""
        scheme, _, shown = authorization.partition(" ")
        token = self._token()
        equal = hmac.compare_digest(shown.strip().encode(), token.encode())
        return scheme.lower() == "bearer" and bool(token) and equal

    def _token(self) -> str:
        try:
            return Path(self._token_file).read_text().strip()
        except OSError:
            return ""


def _url(runner: web.AppRunner, context: ssl.SSLContext | None) -> str:
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if context is None else 'https'}://{shown}:{port}"
