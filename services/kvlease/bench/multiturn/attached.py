"""The experiment on engines that run already: behind a kvlease router, or two with stock connectors."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import aiohttp

from kvlease.bench.multiturn.client import Fleet, RoutedFleet
from kvlease.bench.multiturn.engines import TurnFailedError, engine_facts
from kvlease.bench.multiturn.fleet import Running, bench_session, vocabulary_of
from kvlease.bench.multiturn.plan import Mode
from kvlease.bench.multiturn.stock import KEPT_S, KeptRoom, StockFleet
from kvlease.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Attachment:
    """Engines that run, and who sends them turns.

    Attributes:
        mode: what the router's own settings do with turn two; `STOCK` without a router.
        router_url: empty for stock engines.
        vocabulary: token ids that the model has; None asks its config.json.
        model: directory of that file; None looks where the engine says that its model is.
        key: API key of router and engines; empty: none.
    """

    mode: Mode
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    router_url: str = ""
    vocabulary: int | None = None
    model: Path | None = None
    key: str = ""

    def __post_init__(self) -> None:
        if not self.prefill_urls or not self.decode_urls:
            raise InvalidArgument(
                "--prefill-url and --decode-url: both are needed, since the engines' own counters tell what was READ"
            )
        if bool(self.router_url) is (self.mode is Mode.STOCK):
            raise InvalidArgument(
                f"--modes {self.mode}: stock engines are measured without --router-url, all other modes with it"
            )
        if self.mode is Mode.STOCK and (len(self.prefill_urls), len(self.decode_urls)) != (1, 1):
            raise InvalidArgument("--modes stock: one --prefill-url and one --decode-url")
        if self.vocabulary is not None and self.vocabulary < 8:
            raise InvalidArgument(f"--vocabulary must be at least 8, not {self.vocabulary}")


@asynccontextmanager
async def attached(attachment: Attachment, say: Callable[[str], None]) -> AsyncGenerator[Running, None]:
    """The engines, checked for one model; they are left running.

    Args:
        say: takes what a person should know of them.

    Raises:
        InvalidArgument: they have different models, or nobody tells how many token ids the model has.
        TurnFailedError: an engine or the router does not answer as one.
    """
    async with bench_session(attachment.key) as session:
        urls = (*attachment.prefill_urls, *attachment.decode_urls)
        facts = [await engine_facts(session, url) for url in urls]
        model = facts[-1].model
        for url, other in zip(urls, facts, strict=True):
            if other.model != model:
                raise InvalidArgument(f"{url} serves {other.model!r}, but {urls[-1]} serves {model!r}")
        for url, own in zip(attachment.prefill_urls, facts, strict=False):
            if own.has_prefix_cache:
                say(
                    f"{url} has a prefix cache of its own: what it still has of a first turn, it does not READ back"
                )
        fleet: Fleet
        if attachment.router_url:
            await _require_router(session, attachment.router_url)
            fleet = RoutedFleet(session, attachment.router_url, model)
        else:
            room = KeptRoom.of(facts[-1], KEPT_S)
            fleet = StockFleet(session, attachment.prefill_urls[0], attachment.decode_urls[0], model, room)
        yield Running(
            session,
            attachment.prefill_urls,
            attachment.decode_urls,
            {attachment.mode: fleet},
            model,
            _vocabulary(attachment, facts[-1].root),
        )


async def _require_router(session: aiohttp.ClientSession, router_url: str) -> None:
    """Checks that the router knows an engine of each role: without one it decodes alone what a leg should be for."""
    url = f"{router_url}/health"
    async with session.get(url) as response:
        answer: object = await response.json(content_type=None) if response.status == HTTPStatus.OK else None
    engines = cast("dict[str, Any]", answer).get("engines") if isinstance(answer, dict) else None
    if not isinstance(engines, dict):
        raise TurnFailedError(f"{url} answered {response.status}, and not as a kvlease router does")
    for role in ("prefill", "decode"):
        if not cast("dict[str, Any]", engines).get(role):
            raise TurnFailedError(f"{router_url} knows no {role} engine")


def _vocabulary(attachment: Attachment, root: str) -> int:
    if attachment.vocabulary is not None:
        return attachment.vocabulary
    directory = attachment.model or Path(root or ".")
    if attachment.model is None and not (root and (directory / "config.json").is_file()):
        raise InvalidArgument(
            f"the model is at {root or 'an unknown place'}, which is no directory of this machine: "
            "say how many token ids it has by --vocabulary, or where its config.json is by --model"
        )
    return vocabulary_of(directory)
