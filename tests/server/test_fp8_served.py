"""With an FP8 KV cache, the text equals that of stock SGLang whose keys and values are rounded to FP8.

Stock has no FP8 cache on a CPU without AMX. So stock's cache stays in float32, and keys and values are rounded before
they are stored.

Policy full in torch computes the same bits as stock's attention. Any two other kernels differ in the last bits of
float32. Sometimes such a bit decides to which FP8 number a key of the next layer is rounded, and then logprobs differ
by tenths. So with FP8, two different kernels need not give the same text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import greedy

STEPS = 12  # the longer prompt's row crosses a block boundary


@pytest.mark.full
def test_the_text_is_stocks_over_a_cache_rounded_to_fp8(model: Path, english: list[int]) -> None:
    prompts = [english[700:742], english[2000:2187]]
    (rounded,) = greedy(model, "rounded", prompts, STEPS, [[]])
    assert greedy(model, "hybrid", prompts, STEPS, [["policy=full"]], ["--kv-cache-dtype=fp8_e4m3"]) == [rounded]
