"""Installs the switches of a chaos run in the process that runs the model."""

from __future__ import annotations

import faulthandler
import logging
from collections import Counter
from typing import Any

from bench.chaos import freed_pages, same_bits
from bench.chaos.switches import ROWS_NOT_RESET, SAME_BITS, SPOIL_FREED_PAGES, TELL_STACKS, switched_on
from sglang_hybrid import plugin
from sglang_hybrid.policies.scout.policy import ScoutPolicy

logger = logging.getLogger("sglang.srt.hybrid")


def wait_for_the_backend() -> None:
    """Install the switches just before SGLang creates the attention backend: pools exist by then, and no row does."""
    create = plugin.create_backend

    def create_backend(model_runner: Any) -> Any:
        _install(model_runner)
        return create(model_runner)

    plugin.create_backend = create_backend


def _install(model_runner: Any) -> None:
    switches = switched_on()
    logger.warning("this server is made for a chaos run (%s): it is slow, and of no other use", ", ".join(switches))
    faulthandler.register(TELL_STACKS, all_threads=True)
    if SAME_BITS in switches:
        same_bits.install()
    if SPOIL_FREED_PAGES in switches:
        freed_pages.spoil(model_runner.token_to_kv_pool_allocator, model_runner.token_to_kv_pool)
    if ROWS_NOT_RESET in switches:
        _keep_rows()


def _keep_rows() -> None:
    """Install a bug on purpose: a row's second request begins with the state that the first one left."""
    reset, times = ScoutPolicy.reset_rows, Counter[int]()

    def reset_once(policy: ScoutPolicy, rows: list[int]) -> None:
        reset(policy, [row for row in rows if times[row] < 2])  # at creation, and for its first request
        times.update(rows)

    ScoutPolicy.reset_rows = reset_once  # type: ignore[method-assign, assignment]
