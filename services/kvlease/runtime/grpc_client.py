"""Channels to other processes, opened when first used and kept."""

import grpc
import grpc.aio

from kvlease.runtime.grpc_server import MESSAGE_BYTES_MAX
from kvlease.runtime.telemetry import NO_TELEMETRY, Telemetry
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
        telemetry: traces the calls that belong to a turn.
    """

    def __init__(self, telemetry: Telemetry = NO_TELEMETRY, channels_max: int = 1024) -> None:
        self._interceptors = [TracingClientInterceptor(telemetry.tracer)] if telemetry.enabled else []
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._channels_max = channels_max

    async def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port` or `unix:/path`."""
        channel = self._channels.get(address)
        if channel is None:
            if len(self._channels) >= self._channels_max:
                await self._channels.pop(next(iter(self._channels))).close(None)
            channel = grpc.aio.insecure_channel(
                address, options=CHANNEL_OPTIONS, interceptors=self._interceptors
            )
            self._channels[address] = channel
        return channel

    async def close(self) -> None:
        """Closes them all."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)
