"""Channels to other processes, opened when first used and kept."""

import grpc
import grpc.aio

from kvlease.runtime.grpc_server import MESSAGE_BYTES_MAX
from kvlease.runtime.identity import Identity
from kvlease.runtime.telemetry import NO_TELEMETRY, Telemetry
from kvlease.runtime.tls import Tls
from kvlease.runtime.trace_interceptors import TracingClientInterceptor

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A host that died without a word is noticed within 15 s also between calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again within a heartbeat; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class Channels:
    """One channel per address, kept until `close`. At most `channels_max`: then the oldest one goes.

    Args:
        peer: what the processes at the addresses are: over TLS their certificates must say so.
        telemetry: traces the calls that belong to a turn.
        tls: own certificates; a channel whose certificates were replaced since is opened anew by the next
            call, and calls under way end on the old one.
    """

    def __init__(
        self,
        peer: Identity,
        telemetry: Telemetry = NO_TELEMETRY,
        tls: Tls | None = None,
        channels_max: int = 1024,
    ) -> None:
        self._interceptors = [TracingClientInterceptor(telemetry.tracer)] if telemetry.enabled else []
        self._tls = tls
        # The name that servers prove: not an address, which changes with every pod.
        self._options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer.value))
        self._stamp = tls.certificates().stamp if tls is not None else None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._replaced: list[grpc.aio.Channel] = []
        self._channels_max = channels_max

    async def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port` or `unix:/path`."""
        await self._follow_certificates()
        channel = self._channels.get(address)
        if channel is None:
            if len(self._channels) >= self._channels_max:
                await self._channels.pop(next(iter(self._channels))).close(None)
            channel = self._open(address)
            self._channels[address] = channel
        return channel

    async def close(self) -> None:
        """Closes them all."""
        channels = [*self._replaced, *self._channels.values()]
        self._channels, self._replaced = {}, []
        for channel in channels:
            await channel.close(None)

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(
                address, options=CHANNEL_OPTIONS, interceptors=self._interceptors
            )
        return grpc.aio.secure_channel(
            address,
            self._tls.channel_credentials(),
            options=self._options,
            interceptors=self._interceptors,
        )

    async def _follow_certificates(self) -> None:
        """Leaves the channels of certificates that were replaced; streams on them go on until the next time."""
        if self._tls is None or (stamp := self._tls.certificates().stamp) == self._stamp:
            return
        self._stamp = stamp
        ended, self._replaced, self._channels = self._replaced, list(self._channels.values()), {}
        for channel in ended:
            await channel.close(None)
