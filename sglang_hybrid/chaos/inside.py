"""What a chaos run switches on in the process that runs the model."""

from __future__ import annotations

import faulthandler
import logging
from collections import Counter

from sglang_hybrid import env
from sglang_hybrid.chaos import same_bits
from sglang_hybrid.chaos.switches import ROWS_NOT_RESET, SAME_BITS, TELL_STACKS
from sglang_hybrid.policies.scout import ScoutPolicy

logger = logging.getLogger("sglang.srt.hybrid")


def install() -> None:
    switches = env.CHAOS.get()
    logger.warning("this server is made for a chaos run (%s): it is slow, and of no other use", ", ".join(switches))
    faulthandler.register(TELL_STACKS, all_threads=True)
    if SAME_BITS in switches:
        same_bits.install()
    if ROWS_NOT_RESET in switches:
        _keep_rows()


def _keep_rows() -> None:
    """A bug on purpose: a row's second request begins with what the first one left."""
    begin, begun = ScoutPolicy.rows_begin, Counter[int]()

    def begin_once(policy: ScoutPolicy, rows: list[int]) -> None:
        begin(policy, [row for row in rows if begun[row] < 2])  # when the policy is made, and for its first request
        begun.update(rows)

    ScoutPolicy.rows_begin = begin_once  # type: ignore[method-assign, assignment]
