"""An FP8 KV cache gives the text of stock SGLang over keys and values that were rounded to FP8.

Stock has no FP8 cache on a CPU without AMX. So stock's cache stays in float32, and what is written to it is rounded.

Policy full in torch computes attention as stock does, to the bit. Other kernels differ from it in the last bits of
float32, as any two do. Now and then such a bit decides which number of FP8 a key of the next layer is rounded to, and
then logprobs differ by tenths: over FP8 no two kernels need have the same text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import greedy

STEPS = 12  # crosses a block boundary behind the longer prompt


@pytest.mark.full
def test_the_text_is_stocks_over_a_cache_rounded_to_fp8(model: Path, english: list[int]) -> None:
    prompts = [english[700:742], english[2000:2187]]
    (rounded,) = greedy(model, "rounded", prompts, STEPS, [[]])
    assert greedy(model, "hybrid", prompts, STEPS, [["policy=full"]], ["--kv-cache-dtype=fp8_e4m3"]) == [rounded]
