"""What engines tell of themselves: what they READ so far, and what they are."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import aiohttp

_HANDSHAKES = re.compile(r'^kvlease_handshake_seconds_(sum|count)\{outcome="done"\} (\S+)$', re.MULTILINE)
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'\b(block_size|num_gpu_blocks|enable_prefix_caching)="(\w+)"')


class TurnFailedError(RuntimeError):
    """An engine or a router answered with an error, or said nothing."""


@dataclass(frozen=True, slots=True)
class ReadCounters:
    """What NIXL READ.

    Attributes:
        seconds: of transfers, summed.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    descriptors: float = 0.0

    def __sub__(self, other: "ReadCounters") -> "ReadCounters":
        return ReadCounters(
            self.bytes - other.bytes, self.seconds - other.seconds, self.descriptors - other.descriptors
        )

    def __add__(self, other: "ReadCounters") -> "ReadCounters":
        return ReadCounters(
            self.bytes + other.bytes, self.seconds + other.seconds, self.descriptors + other.descriptors
        )

    def share(self, turns: int) -> "ReadCounters":
        """What one of so many turns had of it."""
        return ReadCounters(self.bytes / turns, self.seconds / turns, self.descriptors / turns)


@dataclass(frozen=True, slots=True)
class Reads:
    """What the engines of each role READ: prefill engines what was kept at decode engines, and these the rest."""

    prefill: ReadCounters
    decode: ReadCounters

    def __sub__(self, other: "Reads") -> "Reads":
        return Reads(self.prefill - other.prefill, self.decode - other.decode)

    def share(self, turns: int) -> "Reads":
        """What one of so many turns had of it."""
        return Reads(self.prefill.share(turns), self.decode.share(turns))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is.

    Attributes:
        root: where its model comes from, as it was told; may be a directory.
        context_tokens: the longest prompt and answer; None where it does not tell.
        version: of vLLM; empty where it does not tell, as the others are None.
        kv_tokens: that its KV has room for.
    """

    model: str
    root: str
    context_tokens: int | None
    version: str
    block_size: int | None
    has_prefix_cache: bool | None
    kv_tokens: int | None

    def to_json(self) -> dict[str, Any]:
        """For a record: what makes figures of two engines differ."""
        return {
            "model": self.model,
            "max_model_len": self.context_tokens,
            "vllm": self.version,
            "block_size": self.block_size,
            "prefix_cache": self.has_prefix_cache,
        }


async def read_counters(session: aiohttp.ClientSession, engine_urls: Sequence[str]) -> ReadCounters:
    """The sums over some engines, from their own metrics.

    Raises:
        TurnFailedError: an engine does not tell its metrics.
    """
    sums = dict.fromkeys(("bytes_transferred", "xfer_time_seconds", "num_descriptors"), 0.0)
    for url in engine_urls:
        lines = (await _text(session, f"{url}/metrics")).splitlines()
        for name in sums:
            wanted = (line for line in lines if line.startswith(f"vllm:nixl_{name}_sum"))
            sums[name] += sum(float(line.rsplit(" ", 1)[1]) for line in wanted)
    return ReadCounters(*sums.values())


async def engine_facts(session: aiohttp.ClientSession, engine_url: str) -> EngineFacts:
    """What an engine tells of itself.

    Raises:
        TurnFailedError: it serves no model.
    """
    url = f"{engine_url}/v1/models"
    async with session.get(url) as response:
        if response.status != HTTPStatus.OK:
            raise TurnFailedError(f"{url} answered {response.status}")
        answer: object = await response.json(content_type=None)
    models = cast("Mapping[str, Any]", answer).get("data") if isinstance(answer, dict) else None
    if not models:
        raise TurnFailedError(f"{url} names no model: is this an engine?")
    model: Mapping[str, Any] = models[0]
    cache = _CACHE.search(await _text(session, f"{engine_url}/metrics"))
    labels = dict(_LABEL.findall(cache[1])) if cache else {}
    sizes = [
        int(labels[name]) if labels.get(name, "").isdigit() else None
        for name in ("block_size", "num_gpu_blocks")
    ]
    block_size, blocks = sizes
    return EngineFacts(
        model["id"],
        model.get("root") or "",
        model.get("max_model_len"),
        await _version(session, engine_url),
        block_size,
        labels["enable_prefix_caching"] == "True" if "enable_prefix_caching" in labels else None,
        block_size * blocks if block_size and blocks else None,
    )


async def handshakes(session: aiohttp.ClientSession, sidecar_urls: Sequence[str]) -> dict[str, float]:
    """How many NIXL handshakes were done before a turn needed them, and what one took, which no READ waited for.

    Raises:
        TurnFailedError: a sidecar does not tell its metrics.
    """
    sums = {"sum": 0.0, "count": 0.0}
    for url in sidecar_urls:
        for name, value in _HANDSHAKES.findall(await _text(session, f"{url}/metrics")):
            sums[name] += float(value)
    return {"count": sums["count"], "mean_ms": sums["sum"] * 1e3 / max(1.0, sums["count"])}


async def tokenize(session: aiohttp.ClientSession, engine_url: str, model: str, text: str) -> list[int]:
    """A text's tokens, without those that an engine puts around a prompt.

    Raises:
        TurnFailedError: the engine has no tokenizer.
    """
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    async with session.post(f"{engine_url}/tokenize", json=body) as response:
        if response.status != HTTPStatus.OK:
            raise TurnFailedError(
                f"{engine_url}/tokenize answered {response.status}: {await response.text()}"
            )
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


async def _version(session: aiohttp.ClientSession, engine_url: str) -> str:
    async with session.get(f"{engine_url}/version") as response:
        if response.status != HTTPStatus.OK:
            return ""  # only vLLM itself has it
        return str((await response.json(content_type=None)).get("version", ""))


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        if response.status != HTTPStatus.OK:
            raise TurnFailedError(f"{url} answered {response.status}")
        return await response.text()
