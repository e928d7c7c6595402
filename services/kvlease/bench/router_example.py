"""A proxy as most begin with it: FastAPI in front, httpx behind, the prefill leg first, then the decode leg.

Run by an interpreter that has fastapi, httpx and uvicorn, and nothing of this package:
`python router_example.py PORT PREFILL_URL DECODE_URL`.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PORT, PREFILL_URL, DECODE_URL = int(sys.argv[1]), sys.argv[2], sys.argv[3]
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One pool of connections to each engine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=PREFILL_URL, timeout=None, limits=limits) as prefill,
        httpx.AsyncClient(base_url=DECODE_URL, timeout=None, limits=limits) as decode,
    ):
        app.state.prefill, app.state.decode = prefill, decode
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    """Ready as soon as it serves."""
    return {"status": "ok"}


@app.post(CHAT)
async def chat(request: Request) -> Response:
    """One token at the prefill engine, then the answer of the decode engine."""
    body: dict[str, Any] = await request.json()
    first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    first.pop("stream_options", None)
    answered = await app.state.prefill.post(CHAT, json=first)
    answered.raise_for_status()
    second = {**body, "kv_transfer_params": answered.json()["kv_transfer_params"]}
    if not body.get("stream"):
        whole = await app.state.decode.post(CHAT, json=second)
        return JSONResponse(whole.json(), status_code=whole.status_code)

    async def pieces() -> AsyncIterator[bytes]:
        async with app.state.decode.stream("POST", CHAT, json=second) as streamed:
            async for piece in streamed.aiter_bytes():
                yield piece

    return StreamingResponse(pieces(), media_type="text/event-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
