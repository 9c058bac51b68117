"""Client that sends all rows of a batch at once and records when their tokens arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from bench.side_by_side.statistics import Arrivals

Beside = Callable[[aiohttp.ClientSession], Awaitable[None]]  # runs once all rows have ``beside_after`` tokens
# the answer to prompt number n: tokens so far, ids and SGLang's meta_info, whenever there are more tokens
Ask = Callable[[aiohttp.ClientSession, int], AsyncIterator[tuple[int, list[int], dict[str, Any]]]]
_NOTHING: Mapping[str, Any] = {}


class LoadError(RuntimeError):
    """A request failed; the message has the server's error."""


def send_together(
    url: str,
    prompts: list[list[int]],
    new_tokens: int,
    beside: Beside | None = None,
    *,
    beside_after: int = 1,
    seconds: float = 1800,
    more: Mapping[str, Any] = _NOTHING,
) -> list[Arrivals]:
    """Send all prompts at the same time and return when the tokens of each answer arrived. Raise LoadError.

    Answers are greedy and have exactly ``new_tokens`` tokens. ``beside`` runs once every row has ``beside_after``
    tokens. ``seconds``: time limit of everything. ``more``: further fields of every request.
    """

    def ask(session: aiohttp.ClientSession, index: int) -> AsyncIterator[Any]:
        return stream(session, url, body_of(prompts[index], new_tokens, more), new_tokens)

    return send_rows(ask, len(prompts), beside, beside_after=beside_after, seconds=seconds)


def send_rows(
    ask: Ask, count: int, beside: Beside | None = None, *, beside_after: int = 1, seconds: float = 1800
) -> list[Arrivals]:
    """Do the same as ``send_together`` for ``count`` rows, each of which is requested by ``ask``."""

    async def send() -> list[Arrivals]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            return await rows_of(session, ask, count, beside, beside_after)

    return asyncio.run(send())


async def rows_of(
    session: aiohttp.ClientSession, ask: Ask, count: int, beside: Beside | None = None, beside_after: int = 1
) -> list[Arrivals]:
    begin = time.monotonic()
    rows = [Arrivals(sent=begin) for _ in range(count)]
    waiting = set(range(count))
    all_began = asyncio.Event()

    async def one(index: int) -> None:
        row = rows[index]
        async for tokens, ids, row.meta in ask(session, index):
            row.times.append(time.monotonic())
            row.tokens.append(tokens)
            # SGLang sends all ids so far, or with another setting only the new ones
            row.ids = ids if len(ids) == tokens else row.ids + ids
            if tokens >= beside_after:
                waiting.discard(index)
            if not waiting:
                all_began.set()

    async def other(action: Beside) -> None:
        await all_began.wait()
        await action(session)

    tasks = [asyncio.create_task(one(index)) for index in range(count)]
    if beside is not None:
        tasks.append(asyncio.create_task(other(beside)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    return rows


def body_of(ids: list[int], new_tokens: int, more: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "stream": True, **more}


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], new_tokens: int
) -> AsyncIterator[tuple[int, list[int], dict[str, Any]]]:
    """Send a request. Yield tokens so far, ids and SGLang's meta_info whenever there are more. Raise LoadError."""
    had = 0
    async with session.post(f"{url}/generate", json=body) as reply:
        if reply.status != 200:
            raise LoadError(f"status {reply.status}: {(await reply.text())[:500]}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line[len(b"data: ") :])
            if "error" in answer:
                raise LoadError(str(answer["error"])[:500])
            if why := abort_message(answer["meta_info"]):
                raise LoadError(why[:500])
            if (tokens := answer["meta_info"]["completion_tokens"]) > had:
                had = tokens
                yield tokens, answer.get("output_ids", []), answer["meta_info"]
    if had < new_tokens:
        raise LoadError(f"an answer ended after {had} of {new_tokens} tokens")


def abort_message(meta: Mapping[str, Any]) -> str:
    """Return why SGLang ended an answer early, such as a prompt that does not fit; empty if it did not."""
    reason = meta.get("finish_reason")
    return str(reason.get("message") or "aborted") if isinstance(reason, dict) and reason.get("type") == "abort" else ""
