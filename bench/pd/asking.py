"""Requests to both instances, as a router sends them: the two find each other by the number of a room."""

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
    """For ``send_rows``: the decode instance's answer to one of the prompts, once the prefill instance has it too."""

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
