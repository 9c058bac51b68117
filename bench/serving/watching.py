"""Samples what a server holds while it works: GPU memory by nvidia-smi, host pages by the server's own report."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from types import TracebackType
from typing import Any

from bench.side_by_side.gpu_memory import used_bytes
from sglang_hybrid.commands.pd.processes import get


def gpu_mib() -> int | None:
    """Return the MiB in use on the first GPU, by all processes; None without a GPU."""
    used = used_bytes()
    return None if used is None else used >> 20


def held(url: str) -> dict[str, int]:
    """Return the pool's tokens in use, the running requests and the pool's size, as SGLang reports them."""
    load = json.loads(get(f"{url}/v1/loads") or b'{"loads": [{}]}')["loads"][0]
    names = {"tokens": "num_used_tokens", "running": "num_running_reqs", "pool_tokens": "max_total_num_tokens"}
    return {name: int(load[key]) for name, key in names.items() if key in load}


def wait_until_idle(url: str, seconds: float = 60) -> dict[str, int]:
    """Wait until no request runs and return what the server then holds. Raise TimeoutError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (now := held(url)).get("running") != 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"requests still run after {seconds:.0f} s: {now}")
        time.sleep(0.2)  # no event to wait for: SGLang does not report that it became idle
    return now


class Watch:
    """Samples GPU memory and pool every ``interval`` seconds. Use as a context manager around the load."""

    def __init__(self, url: str, interval: float = 1.0) -> None:
        self._url, self._interval = url, interval
        self._over = threading.Event()
        self._samples: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while True:
            self.sample()
            if self._over.wait(self._interval):
                return

    def sample(self) -> None:
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError, KeyError, OSError):
            found = held(self._url)
        self._samples.append({"gpu_mib": gpu_mib(), **found})

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(30)

    def summary(self) -> dict[str, Any]:
        """Return the least and the most of each figure; None for a figure without samples."""
        found: dict[str, Any] = {"samples": len(self._samples)}
        for name in ("gpu_mib", "tokens", "running"):
            values = [sample[name] for sample in self._samples if sample.get(name) is not None]
            found[name] = {"least": min(values), "most": max(values)} if values else None
        return found
