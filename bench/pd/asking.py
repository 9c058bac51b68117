"""Sends requests to a prefill and a decode instance, as a router does; they match requests by ``bootstrap_room``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from bench.pd.instances import Instances
from bench.side_by_side.load import Ask, body_of, stream

_ROOMS = itertools.count(1000)


def ask_both(instances: Instances, prompts: list[list[int]], new_tokens: int) -> Ask:
    """Return an ``Ask`` for ``send_rows``: send a prompt to both instances, yield the decode instance's answer."""

    async def ask(session: aiohttp.ClientSession, index: int) -> AsyncIterator[Any]:
        room = {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": instances.bootstrap, "bootstrap_room": next(_ROOMS),
        }  # fmt: skip
        body = body_of(prompts[index], new_tokens, room)
        prefilled = asyncio.create_task(_prefill(session, instances.prefill.url, body))
        try:
            async for part in stream(session, instances.decode.url, body, new_tokens):
                yield part
            await prefilled
        finally:
            prefilled.cancel()

    return ask


async def _prefill(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(f"{url}/generate", json=body) as reply:
        await reply.read()
