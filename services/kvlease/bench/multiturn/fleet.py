"""Starts the engines of the experiment: one prefill and one decode engine, with kvlease or with stock connectors."""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvlease.bench.multiturn.client import Fleet, RoutedFleet
from kvlease.bench.multiturn.engines import Reads, engine_facts, read_counters
from kvlease.bench.multiturn.plan import Mode
from kvlease.bench.multiturn.stock import KEPT_S, KeptRoom, StockFleet
from kvlease.core.errors import InvalidArgument
from kvlease.core.records import EngineRole
from kvlease.dev.engine_process import (
    PATIENT_CONNECTOR,
    ConnectorChoice,
    Device,
    EngineProcess,
    EngineSpec,
    free_ports,
)
from kvlease.dev.engine_process import EngineRole as ProcessRole
from kvlease.dev.stack import EngineSeat, Stack, StackPlan
from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer

SERVED_MODEL = "multiturn"
NEVER = 1 << 30
AUTO_SAMPLES = 6
"""Measurements of each rate before AUTO plans by them; the warm-up takes as many of each path."""
REQUEST_TIMEOUT_S = 600.0


def _qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 151645,
        "bos_token_id": 151643,
    }


SHAPES = {"qwen3-8b": _qwen3(4096, 12288, 36, 32), "qwen3-32b": _qwen3(5120, 25600, 64, 64)}
"""Shapes of published models (their config.json): with dummy weights, arithmetic and memory traffic are the
model's own, and its text means nothing."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """How the engines are started.

    Attributes:
        arguments: of `vllm serve`, for both engines, after those of `kvlease dev`.
        prefill_arguments: the same for the prefill engine alone.
        gpus: index of the GPU of the prefill and of the decode engine.
        stock_config: more of the stock connectors' extra config.
    """

    device: Device
    python: Path
    model: Path
    arguments: tuple[str, ...]
    prefill_arguments: tuple[str, ...]
    gpus: tuple[int, ...] = (0, 1)
    stock_config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def vocabulary(self) -> int:
        """Token ids that the model has."""
        return vocabulary_of(self.model)

    def spec(self, role: ProcessRole, seat: EngineSeat, connector: ConnectorChoice) -> EngineSpec:
        """What one engine is started with."""
        own = self.prefill_arguments if role is ProcessRole.PREFILL else ()
        return EngineSpec(
            role=role,
            python=self.python,
            model=self.model,
            log_file=seat.log_file,
            port=seat.port,
            side_channel_port=seat.side_channel_port,
            connector=connector,
            socket_dir=seat.socket_dir,
            device=self.device,
            gpu=self.gpus[seat.number],
            served_model_name=SERVED_MODEL,
            kvlease_config=PATIENT_CONNECTOR if self.device is Device.CPU else {},
            stock_config=self.stock_config,
            # Without it an engine does not say how much of a prompt it had.
            extra_arguments=("--enable-prompt-tokens-details", *self.arguments, *own),
        )


@dataclass(frozen=True, slots=True)
class Running:
    """Engines that serve, and the fleet of every mode that they are for.

    Attributes:
        model: as requests name it.
        vocabulary: token ids that it has.
        sidecar_urls: where the engines' sidecars tell their metrics, as far as they were started here.
    """

    session: aiohttp.ClientSession
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    fleets: dict[Mode, Fleet]
    model: str
    vocabulary: int
    sidecar_urls: tuple[str, ...] = ()

    async def reads(self) -> Reads:
        """What the engines READ so far. They count a transfer with their next step."""
        return Reads(
            await read_counters(self.session, self.prefill_urls),
            await read_counters(self.session, self.decode_urls),
        )


def vocabulary_of(model: Path) -> int:
    """Token ids that a model has, from its configuration.

    Raises:
        InvalidArgument: there is none in the directory, or it does not tell.
    """
    path = model / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        # A model of more than text keeps the text's part apart.
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidArgument(f"{path} tells no vocab_size: {type(error).__name__}: {error}") from error


def write_shape(name: str) -> Path:
    """A model directory with the configuration of a shape and no weights."""
    directory = Path(tempfile.gettempdir()) / f"kvlease-shape-{name}"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    return directory


def router_config(mode: Mode) -> RouterConfig:
    """A router that takes one path wherever it can; with AUTO one that soon plans by what it measured."""
    thresholds = RouterConfig(gap_floor_s=300.0, rate_samples_min=0)
    match mode:
        case Mode.OFF:
            return replace(thresholds, reuse_tokens_min=NEVER)
        case Mode.ON:
            return replace(thresholds, append_tokens_max=0)
        case Mode.APPEND:
            return replace(thresholds, append_tokens_max=NEVER)
        case _:
            return replace(thresholds, rate_samples_min=AUTO_SAMPLES)


@asynccontextmanager
async def kvlease_engines(
    choice: EngineChoice, modes: tuple[Mode, ...], progress: Callable[[str], None]
) -> AsyncGenerator[Running, None]:
    """Engines with kvlease's connector, and a router for every mode."""

    def make(seat: EngineSeat) -> EngineProcess:
        return EngineProcess(choice.spec(ProcessRole(seat.role.value), seat, ConnectorChoice.KVLEASE))

    stack = Stack(StackPlan(1, 1, make), progress)
    routers: list[RouterServer] = []
    async with bench_session() as session:
        try:
            await stack.start()
            fleets: dict[Mode, Fleet] = {}
            for mode in modes:
                router = await stack.start_router(router_config(mode))
                routers.append(router)
                fleets[mode] = RoutedFleet(session, router.url, SERVED_MODEL)
            urls = [tuple(stack.engine_urls(role)) for role in (EngineRole.PREFILL, EngineRole.DECODE)]
            sidecars = tuple(sidecar.admin_url for sidecar in stack.sidecars)
            yield Running(session, urls[0], urls[1], fleets, SERVED_MODEL, choice.vocabulary, sidecars)
        finally:
            for router in routers:
                await router.stop()
            await stack.stop()


@asynccontextmanager
async def stock_engines(
    choice: EngineChoice, progress: Callable[[str], None]
) -> AsyncGenerator[Running, None]:
    """Engines with vLLM's own NIXL connector, bidirectional, without a router."""
    ports = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="kvlease-stock-") as folder:
        engines = [
            EngineProcess(choice.spec(role, _seat(role, number, ports, Path(folder)), ConnectorChoice.STOCK))
            for number, role in enumerate(ProcessRole)
        ]
        async with bench_session() as session:
            try:
                for engine in engines:
                    await engine.start()
                waited_s = await asyncio.gather(*(engine.wait_ready() for engine in engines))
                progress(f"stock engines serve after {max(waited_s):.0f} s")
                prefill, decode = (engine.base_url for engine in engines)
                kept_s = float(choice.stock_config.get("decoder_kv_blocks_ttl", KEPT_S))
                room = KeptRoom.of(await engine_facts(session, decode), kept_s)
                fleet = StockFleet(session, prefill, decode, SERVED_MODEL, room)
                yield Running(
                    session, (prefill,), (decode,), {Mode.STOCK: fleet}, SERVED_MODEL, choice.vocabulary
                )
            finally:
                await asyncio.gather(*(engine.stop() for engine in engines))


@asynccontextmanager
async def both_engines(
    choice: EngineChoice, modes: tuple[Mode, ...], progress: Callable[[str], None]
) -> AsyncGenerator[Running, None]:
    """Engines of both kinds, started at once, on the same GPUs: each takes its share of their memory.

    Whoever is not measured is idle, and adds nothing to the counters.
    """
    async with AsyncExitStack() as started:
        ours, stock = await asyncio.gather(
            started.enter_async_context(kvlease_engines(choice, modes, progress)),
            started.enter_async_context(stock_engines(choice, progress)),
        )
        yield replace(
            ours,
            prefill_urls=ours.prefill_urls + stock.prefill_urls,
            decode_urls=ours.decode_urls + stock.decode_urls,
            fleets=ours.fleets | stock.fleets,
        )


def _seat(role: ProcessRole, number: int, ports: list[int], folder: Path) -> EngineSeat:
    return EngineSeat(
        EngineRole(role.value),
        number,
        ports[2 * number],
        ports[2 * number + 1],
        folder,
        folder / f"{role}.log",
    )


def bench_session(key: str = "") -> aiohttp.ClientSession:
    """A session for turns, which may take long. `key` is an API key of whoever is asked."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S), headers=headers)
