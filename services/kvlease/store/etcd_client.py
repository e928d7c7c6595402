"""A thin client of etcd over `grpc.aio`: several endpoints, a deadline for every call, TLS, tokens.

Every failure is a `StoreUnavailable` whose cause is gRPC's error. A call that one endpoint does not answer
goes to the next one within the same deadline, and later calls begin there.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvlease.core.errors import InvalidArgument, StoreUnavailable
from kvlease.etcd import etcd_pb2

Response = TypeVar("Response", bound=Message)
WatchCall: TypeAlias = "grpc.aio.StreamStreamCall[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]"

VERSION_MIN = (3, 5, 23)
"""Before it a keep-alive could succeed for a lease that was already revoked."""

MESSAGE_BYTES_MAX = 64 << 20
"""A revoke can delete 50,000 keys in one revision."""

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # etcd hangs up on clients that ping more often than every 5 s, or without a call.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted member is found again within a second; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the longest that connecting may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_ASK_NEXT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """How etcd is reached.

    Attributes:
        endpoints: `host:port` of the members; any one can answer.
        call_s: bound of one call, over all endpoints that are tried.
        ca_file: certificates that servers are checked against; empty: no TLS. All three files are read again
            when they were replaced.
        certificate_file: the client's own certificate, with `key_file`; empty: none.
        password_file: file with the password of `user`.
        accept_old: use a server older than `VERSION_MIN`.
    """

    endpoints: tuple[str, ...]
    call_s: float = 1.0
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    user: str = ""
    password_file: str = ""
    accept_old: bool = False


class EtcdClient:
    """Calls etcd. Its channels are opened in the running loop when first used, and kept until `close`."""

    def __init__(self, options: EtcdOptions) -> None:
        if not options.endpoints:
            raise InvalidArgument("etcd needs at least one endpoint")
        self._options = options
        self._credentials = _credentials(options)
        self._stamp = _stamp(options)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._replaced: list[grpc.aio.Channel] = []
        self._checked: set[str] = set()
        self._current = 0
        self._token = ""

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked first."""
        return self._options.endpoints[self._current]

    def leave(self, endpoint: str) -> None:
        """Asks the endpoint after this one first, if this one was."""
        if endpoint == self.endpoint:
            self._current = (self._current + 1) % len(self._options.endpoints)

    def forget_token(self) -> None:
        """Authenticates again before the next call."""
        self._token = ""

    async def close(self) -> None:
        """Closes the channels; calls under way are cancelled."""
        channels = [*self._replaced, *self._channels.values()]
        self._channels, self._replaced = {}, []
        for channel in channels:
            await channel.close(None)

    # --- calls --------------------------------------------------------------------------------------------

    async def transact(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Compares, then does one list of operations or the other, in one revision."""
        return await self._call("/etcdserverpb.KV/Txn", request, etcd_pb2.TxnResponse)

    async def get(self, key: str) -> etcd_pb2.KeyValue | None:
        """What lies under a key."""
        request = etcd_pb2.RangeRequest(key=key.encode())
        response = await self._call("/etcdserverpb.KV/Range", request, etcd_pb2.RangeResponse)
        return response.kvs[0] if response.kvs else None

    async def list_prefix(
        self, prefix: str, page: int = 1000
    ) -> tuple[list[etcd_pb2.KeyValue], etcd_pb2.ResponseHeader]:
        """Everything below a prefix at one revision, which the header names; asked for page by page."""
        start, end = prefix.encode(), prefix_end(prefix)
        kvs: list[etcd_pb2.KeyValue] = []
        header = etcd_pb2.ResponseHeader()
        while True:
            request = etcd_pb2.RangeRequest(key=start, range_end=end, limit=page, revision=header.revision)
            response = await self._call("/etcdserverpb.KV/Range", request, etcd_pb2.RangeResponse)
            if header.revision == 0:
                header = response.header
            kvs.extend(response.kvs)
            if not response.more:
                return kvs, header
            start = kvs[-1].key + b"\0"

    async def grant(self, ttl_s: int) -> int:
        """A lease that ends by itself `ttl_s` after its last renewal. Its id."""
        request = etcd_pb2.LeaseGrantRequest(TTL=ttl_s)
        response = await self._call("/etcdserverpb.Lease/LeaseGrant", request, etcd_pb2.LeaseGrantResponse)
        return response.ID

    async def keep_alive(self, lease: int) -> bool:
        """Renews a lease. False when there is none any more."""
        # The method is a stream of both sides; one request, then the end, is a call like any other.
        request = etcd_pb2.LeaseKeepAliveRequest(ID=lease)
        path = "/etcdserverpb.Lease/LeaseKeepAlive"
        response = await self._call(path, request, etcd_pb2.LeaseKeepAliveResponse)
        return response.TTL > 0

    async def attached_keys(self, lease: int) -> tuple[str, ...]:
        """The keys that end with a lease; none when it has ended."""
        request = etcd_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
        path = "/etcdserverpb.Lease/LeaseTimeToLive"
        response = await self._call(path, request, etcd_pb2.LeaseTimeToLiveResponse)
        return tuple(key.decode() for key in response.keys)

    async def revoke(self, lease: int) -> None:
        """Ends a lease and removes its keys in one revision; idempotent."""
        request = etcd_pb2.LeaseRevokeRequest(ID=lease)
        try:
            await self._call("/etcdserverpb.Lease/LeaseRevoke", request, etcd_pb2.LeaseRevokeResponse)
        except StoreUnavailable as error:
            if _code(error) is not grpc.StatusCode.NOT_FOUND:
                raise

    async def status(self, endpoint: str) -> etcd_pb2.StatusResponse:
        """Version, size and alarms of one member.

        Raises:
            StoreUnavailable: it did not answer in time, or refused.
        """
        path, request = "/etcdserverpb.Maintenance/Status", etcd_pb2.StatusRequest()
        try:
            return await self._ask(endpoint, path, request, etcd_pb2.StatusResponse, self._options.call_s)
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from error

    async def open_watch(self, endpoint: str) -> WatchCall:
        """A stream of watches at one endpoint, which ends when that member has no leader."""
        await self._prepare(endpoint, self._options.call_s)
        # The stubs infer the request's type from its serializer, and lose it there.
        method: Any = self._channel(endpoint).stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=etcd_pb2.WatchRequest.SerializeToString,
            response_deserializer=etcd_pb2.WatchResponse.FromString,
        )
        call: WatchCall = method(metadata=(*self._metadata(), ("hasleader", "true")))
        return call

    # --- inside -------------------------------------------------------------------------------------------

    async def _call(self, path: str, request: Message, response: type[Response]) -> Response:
        """One call, at each endpoint at most once.

        Raises:
            StoreUnavailable: none answered within the deadline, or one refused.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._options.call_s
        endpoints = len(self._options.endpoints)
        failure: grpc.aio.AioRpcError | None = None
        for left in range(endpoints, 0, -1):
            endpoint = self.endpoint
            try:
                return await self._ask(endpoint, path, request, response, (deadline_s - now_s()) / left)
            except grpc.aio.AioRpcError as error:
                failure = error
                if error.code() not in _ASK_NEXT:
                    break
                self.leave(endpoint)
        assert failure is not None
        raise unavailable(failure) from failure

    async def _ask(
        self, endpoint: str, path: str, request: Message, response: type[Response], deadline_s: float
    ) -> Response:
        """One call at one endpoint; a token that is no longer valid is replaced once."""
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + deadline_s
        try:
            await self._prepare(endpoint, deadline_s)
            return await self._attempt(endpoint, path, request, response, end_s - now_s())
        except grpc.aio.AioRpcError as error:
            if not self._options.user or not is_about_token(error.details() or ""):
                raise
        await self._prepare(endpoint, end_s - now_s())
        return await self._attempt(endpoint, path, request, response, end_s - now_s())

    async def _attempt(
        self, endpoint: str, path: str, request: Message, response: type[Response], deadline_s: float
    ) -> Response:
        method = self._channel(endpoint).unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            answer: Response = await method(request, timeout=deadline_s, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            if is_about_token(error.details() or ""):
                self.forget_token()
            raise
        return answer

    async def _prepare(self, endpoint: str, deadline_s: float) -> None:
        """Gets a token where a user is configured, and checks the server's version once per endpoint."""
        if self._options.user and not self._token:
            login = etcd_pb2.AuthenticateRequest(name=self._options.user, password=self._password())
            path = "/etcdserverpb.Auth/Authenticate"
            answer = await self._attempt(endpoint, path, login, etcd_pb2.AuthenticateResponse, deadline_s)
            self._token = answer.token
        if endpoint not in self._checked:
            path = "/etcdserverpb.Maintenance/Status"
            request = etcd_pb2.StatusRequest()
            status = await self._attempt(endpoint, path, request, etcd_pb2.StatusResponse, deadline_s)
            self._accept_version(endpoint, status.version)
            self._checked.add(endpoint)

    def _password(self) -> str:
        """Read for each login, so that a changed password is found without a restart."""
        try:
            return Path(self._options.password_file).read_text().strip()
        except OSError as error:
            raise StoreUnavailable(f"cannot read etcd's password: {error}") from error

    def _accept_version(self, endpoint: str, version: str) -> None:
        if _parts(version) >= VERSION_MIN:
            return
        least = ".".join(map(str, VERSION_MIN))
        what = (
            f"etcd {version} at {endpoint} is older than {least}: a renewal can succeed for a revoked lease"
        )
        if not self._options.accept_old:
            raise StoreUnavailable(f"{what}; upgrade it, or set etcd_accept_old")
        _log.warning("%s", what)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        self._follow_certificates()
        channel = self._channels.get(endpoint)
        if channel is None:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(endpoint, self._credentials, options=_CHANNEL_OPTIONS)
            self._channels[endpoint] = channel
        return channel

    def _follow_certificates(self) -> None:
        """Leaves the channels of certificates that were replaced; streams on them go on until the next time."""
        stamp = _stamp(self._options)
        if stamp == self._stamp:
            return
        try:
            self._credentials = _credentials(self._options)
        except InvalidArgument as error:
            _log.warning("%s; those before stay in use", error)
            return
        self._stamp = stamp
        self._replaced, self._channels = list(self._channels.values()), {}


def unavailable(error: grpc.aio.AioRpcError) -> StoreUnavailable:
    """The domain's error, with etcd's own words."""
    return StoreUnavailable(f"etcd: {error.code().name}: {error.details()}")


def is_about_token(details: str) -> bool:
    """Whether etcd refused because of the token, which expires and does not survive a change of users."""
    return "invalid auth token" in details or "auth store is old" in details


def prefix_end(prefix: str) -> bytes:
    """The key after the last one that begins with an ASCII prefix."""
    start = prefix.encode()
    return start[:-1] + bytes((start[-1] + 1,))


def parse_endpoints(text: str) -> tuple[str, ...]:
    """The endpoints of a list such as `etcd-0:2379,http://etcd-1:2379`; schemes are left out.

    Raises:
        InvalidArgument: one is not host:port.
    """
    endpoints = tuple(
        part.strip().rstrip("/").rpartition("://")[2] for part in text.split(",") if part.strip()
    )
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidArgument(f"an endpoint of etcd is {endpoint!r}, but must be host:port")
    return endpoints


def _credentials(options: EtcdOptions) -> grpc.ChannelCredentials | None:
    if not options.ca_file:
        return None

    def read(path: str) -> bytes | None:
        return Path(path).read_bytes() if path else None

    try:
        return grpc.ssl_channel_credentials(
            read(options.ca_file), read(options.key_file), read(options.certificate_file)
        )
    except OSError as error:
        raise InvalidArgument(f"cannot read a certificate for etcd: {error}") from error


def _stamp(options: EtcdOptions) -> tuple[tuple[int, int], ...] | None:
    """Differs after the certificates were replaced; None while one is not there."""
    paths = (options.ca_file, options.certificate_file, options.key_file)
    try:
        statuses = [Path(path).stat() for path in paths if path]
    except OSError:
        return None
    return tuple((status.st_mtime_ns, status.st_ino) for status in statuses)


def _code(error: StoreUnavailable) -> grpc.StatusCode | None:
    cause: Any = error.__cause__
    return cause.code() if isinstance(cause, grpc.aio.AioRpcError) else None


def _parts(version: str) -> tuple[int, ...]:
    numbers = version.partition("-")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())
