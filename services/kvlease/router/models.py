"""The models that clients may name: what the decode engines say of theirs, adapters among them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from kvlease.core.records import Engine, EngineRole
from kvlease.router.bodies import parse_answer
from kvlease.router.dialect import objects, text_of
from kvlease.router.engines import EngineTable
from kvlease.router.ports import EnginePort, LegError

MODELS_TIMEOUT_S = 5.0
ENGINES_ASKED_MAX = 32


class Models:
    """Merges the lists of models of the engines."""

    def __init__(self, engines: EngineTable, port: EnginePort) -> None:
        self._engines = engines
        self._port = port

    async def merged(self, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Every model once, as the first engine that has it says; as registered where no engine answers."""
        engines = self._engines.all(EngineRole.DECODE) or self._engines.all()
        by_url = {engine.url: engine for engine in engines}
        asked = list(by_url.values())[:ENGINES_ASKED_MAX]
        lists = await asyncio.gather(*(self._of(engine, headers) for engine in asked))
        models: dict[str, dict[str, Any]] = {}
        for listed in lists:
            for model in listed:
                models.setdefault(text_of(model.get("id")), model)
        for engine in engines:
            models.setdefault(
                engine.model, {"id": engine.model, "object": "model", "created": 0, "owned_by": "kvlease"}
            )
        return [model for name, model in sorted(models.items()) if name]

    async def _of(self, engine: Engine, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        try:
            async with self._port.call(
                "GET", engine.url + "/v1/models", headers, None, MODELS_TIMEOUT_S
            ) as reply:
                answer = parse_answer(await reply.body()) if reply.status == 200 else None
        except LegError:
            self._engines.suspect(engine.holder.engine_id)
            return []
        return objects((answer or {}).get("data"))
