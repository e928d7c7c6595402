"""One simulated engine as a child process."""

from dataclasses import dataclass

from kvlease.dev.engine_process import BLOCK_TOKENS, HOST, EngineSpec


@dataclass(frozen=True)
class SimEngineSpec(EngineSpec):
    """A simulated engine instead of vLLM; `python` is an interpreter that has the services' packages."""

    def command(self) -> list[str]:
        """Returns the command line of `python -m kvlease.sim`."""
        options = {
            "--host": HOST,
            "--port": str(self.port),
            "--side-channel-port": str(self.side_channel_port),
            "--socket-dir": str(self.socket_dir),
            "--model": self.served_model_name,
            "--block-size": str(BLOCK_TOKENS),
            "--pin-wait-s": "9",
        }
        if self.otlp_endpoint:
            options["--otlp-endpoint"] = self.otlp_endpoint
        values = [part for option in options.items() for part in option]
        return [str(self.python), "-m", "kvlease.sim", *values, *self.extra_arguments]
