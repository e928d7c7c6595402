"""Configuration of a simulated engine's process."""

from dataclasses import dataclass

from kvlease.runtime.config import require, setting
from kvlease.runtime.logging import LogFormat, LogLevel
from kvlease.runtime.telemetry import TracingSettings
from kvlease.runtime.tls import TlsSettings
from kvlease.sim.engine import EngineSettings
from kvlease.sim.reader import ReaderLimits


@dataclass(frozen=True)
class SimConfig(TracingSettings, TlsSettings):
    """Settings of one simulated engine. All durations are seconds."""

    host: str = setting("127.0.0.1", "where the OpenAI API and the side channel listen")
    port: int = setting(8000, "port of the OpenAI API; 0: any free one")
    side_channel_port: int = setting(0, "port on which other engines READ; 0: any free one")
    socket_dir: str = setting("/run/kvlease", "directory of the sidecar's unix socket")
    model: str = setting("sim", "name of the model; engines of one name have the same weights")
    weights_version: str = setting("", "version of the weights; roots every digest")
    block_size: int = setting(16, "tokens of one block")
    total_blocks: int = setting(4096, "blocks of the engine")
    block_bytes: int = setting(16_384, "bytes that a block counts for")
    prefill_token_s: float = setting(2e-5, "to compute one token of a prompt; 50,000 tokens per second")
    decode_step_s: float = setting(0.005, "to compute one token of a reply")
    read_block_s: float = setting(2e-4, "to READ one block")
    read_part_s: float = setting(10.0, "how long a pin's read part lasts")
    pin_wait_s: float = setting(2.0, "how long a pin's answer is waited for")
    recompute_threshold_tokens: int = setting(64, "fewer tokens than this are computed rather than READ")
    reading_cap: float = setting(0.25, "fraction of the blocks that may be pinned at once")
    lifetime_max_s: float = setting(1800.0, "a lease ends this long after its grant")
    log_level: LogLevel = setting(LogLevel.INFO, "debug, info, warning or error")
    log_format: LogFormat = setting(LogFormat.JSON, "json, or text for a terminal")

    def validate(self) -> None:
        """Checks relations between settings.

        Raises:
            ConfigError: one is broken.
        """
        self.validate_tracing()
        require(self.block_size > 0, f"block_size ({self.block_size}) must be at least 1")
        require(self.total_blocks > 0, f"total_blocks ({self.total_blocks}) must be at least 1")
        require(0 < self.reading_cap <= 1, f"reading_cap ({self.reading_cap:g}) must be above 0, at most 1")
        require(
            self.pin_wait_s < self.read_part_s,
            f"pin_wait_s ({self.pin_wait_s:g}) must be below read_part_s ({self.read_part_s:g})",
        )

    def engine(self) -> EngineSettings:
        """The settings of the engine itself."""
        return EngineSettings(
            model=self.model,
            weights_version=self.weights_version,
            block_size=self.block_size,
            total_blocks=self.total_blocks,
            block_bytes=self.block_bytes,
            prefill_token_s=self.prefill_token_s,
            decode_step_s=self.decode_step_s,
            reading_cap=self.reading_cap,
            lifetime_max_s=self.lifetime_max_s,
            reader=ReaderLimits(self.read_part_s, self.recompute_threshold_tokens),
        )
