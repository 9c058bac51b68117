"""Sends growing batches of long prompts to a decode instance with faked transfers, and measures its memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from bench.serving.killing import decode_rate, longest_pause
from bench.serving.watching import Watch, held, wait_until_idle
from bench.side_by_side.load import send_together
from bench.side_by_side.telling import say

# SGLang's name for a prefill instance that does not exist (sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST)
FAKE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}


def grow(url: str, batches: Sequence[int], tokens: int, new_tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Send one batch after the other and return a point for each. The point of a batch that fails has ``error``."""
    points: list[dict[str, Any]] = []
    for rows in batches:
        begun = time.monotonic()
        # the ids decide nothing that is read: no transfer fills the pages, which keep their old content
        prompts = [[7 + row] * tokens for row in range(rows)]
        point: dict[str, Any] = {"rows": rows, "tokens": tokens, "new_tokens": new_tokens}
        try:
            with Watch(url, 0.5) as watch:

                async def look(_session: aiohttp.ClientSession, watch: Watch = watch) -> None:
                    await asyncio.to_thread(watch.sample)  # a short batch may be over before the next sample

                arrived = send_together(
                    url, prompts, new_tokens, look, beside_after=new_tokens // 2, seconds=seconds, more=FAKE
                )
            first = [row.times[0] - row.sent for row in arrived]
            point |= {
                "finished": sum(row.tokens[-1] == new_tokens for row in arrived),
                "tokens_per_s": decode_rate(arrived),
                "longest_pause_s": longest_pause(arrived),
                "all_began_after_s": round(max(first), 2),
                "held": watch.summary(),
                "held_afterwards": wait_until_idle(url),
                "host_tokens_of_prompts": rows * tokens,
            }
        except Exception as error:  # keep the points of smaller batches
            point |= {"error": f"{type(error).__name__}: {str(error)[:500]}", "held_afterwards": held(url)}
        points.append(point)
        say(f"{rows} rows of {tokens}: {point.get('error') or point['tokens_per_s']} tokens/s, {point.get('held')}")
        point["seconds"] = round(time.monotonic() - begun, 1)
    return points


def memory_verdict(points: Sequence[dict[str, Any]], allowed_mib: int = 512) -> dict[str, Any]:
    """Return whether GPU memory stayed flat and host pages grew; ``gpu_stays_flat`` is None without a GPU."""
    good = [point for point in points if "error" not in point and point["held"]["tokens"]]
    gpu = [point["held"]["gpu_mib"]["most"] for point in good if point["held"]["gpu_mib"]]
    host = [point["held"]["tokens"]["most"] for point in good]
    return {
        "gpu_mib": gpu,
        "host_tokens": host,
        "gpu_grew_by_mib": max(gpu) - min(gpu) if gpu else None,
        "gpu_stays_flat": max(gpu) - min(gpu) <= allowed_mib if gpu else None,
        "host_pages_grow": len(host) > 1 and host == sorted(host) and host[-1] > host[0],
    }
