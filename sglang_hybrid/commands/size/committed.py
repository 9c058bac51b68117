"""Committed results to which the estimate of a decode step is fitted, and the estimate's error for each result.

Wheels do not contain bench/results, so the measured times are repeated here; a test compares them with the files.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from sglang_hybrid.commands.size.decode_rate import Rates, hybrid_step, stock_step
from sglang_hybrid.commands.size.model_shape import ModelShape, shape_of
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.scout.options import ScoutOptions

MACHINE = "one H200, 16 Xeon cores"
POLICY = "scout"  # of all results
STOCK_STEPS, HYBRID_STEPS = "decode-steps-stock.json", "decode-steps-hybrid.json"
QWEN_STEPS, SERVERS = "qwen-decode-steps.json", "throughput.json"
CODE_SERVERS = "throughput-long.json"  # slots of 8-bit codes, where the other files have slots of 16 bits

_SYNTHETIC: dict[str, Any] = {  # bench/synthetic_model.py
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 10,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
}  # fmt: skip
_QWEN: dict[str, Any] = {  # Qwen2.5-Coder-1.5B, converted from GGUF
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_BUDGET = 2048
_HOT_TOKENS = 4 * _BUDGET


@dataclass(frozen=True)
class Measured:
    """One measured decode step of a file in bench/results."""

    file: str
    tokens: int
    rows: int
    step_ms: float
    hybrid: bool = False
    most_rows: int = 64  # rows that the server had slots for
    variant: str = ""
    scores_all: bool = True  # False: every 4th step scored all blocks, the steps in between blocks of four budgets

    @property
    def server(self) -> bool:
        return self.file in (SERVERS, CODE_SERVERS)

    @property
    def estimated_ms(self) -> float:
        model = _model(self.file)
        if not self.hybrid:
            return stock_step(model, self.rows, self.tokens, Rates(), server=self.server).ms
        share = 1.0 if self.scores_all else 0.25 + 0.75 * min(1.0, _HOT_TOKENS / self.tokens)
        config = HybridConfig(budget_tokens=_BUDGET, whole_requests="never" if self.file == QWEN_STEPS else "auto")
        slots: Literal["int8", "model"] = "int8" if self.file == CODE_SERVERS else "model"
        return hybrid_step(
            model, config.with_section(ScoutOptions(slot_dtype=slots)), self.rows, self.tokens, Rates(),
            most_rows=self.most_rows, scored_share=share, server=self.server,
        ).ms  # fmt: skip

    @property
    def error(self) -> float:
        """Relative error of the estimate. Above 0, the estimated step is longer than the measured one."""
        return self.estimated_ms / self.step_ms - 1


@functools.cache
def _model(file: str) -> ModelShape:
    return shape_of(_QWEN if file == QWEN_STEPS else _SYNTHETIC, file)


def _qwen(step_ms: float, *settings: str) -> Measured:
    """Return a result with 48 rows of real text. Without scout.score_interval=1 every 4th step scored all blocks."""
    scores_all = "scout.score_interval=1" in settings
    return Measured(QWEN_STEPS, 30720, 48, step_ms, True, 48, ",".join(settings), scores_all)


_EVERY_STEP, _NO_LATE = "scout.score_interval=1", "scout.min_late_attention=1"

RESULTS = (
    Measured(STOCK_STEPS, 32768, 32, 11.655),
    Measured(STOCK_STEPS, 65536, 16, 11.721),
    Measured(STOCK_STEPS, 8192, 64, 7.144),
    Measured(STOCK_STEPS, 8192, 1, 2.171),
    Measured(HYBRID_STEPS, 32768, 32, 3.651, hybrid=True, scores_all=False),
    Measured(HYBRID_STEPS, 65536, 16, 3.211, hybrid=True, scores_all=False),
    Measured(HYBRID_STEPS, 8192, 64, 4.518, hybrid=True, scores_all=False),
    Measured(HYBRID_STEPS, 8192, 1, 2.188, hybrid=True),
    Measured(SERVERS, 8192, 1, 2.39),
    Measured(SERVERS, 16384, 1, 2.659),
    Measured(SERVERS, 32768, 8, 4.57),
    Measured(SERVERS, 32768, 1, 2.567),
    Measured(SERVERS, 65536, 4, 4.568),
    Measured(SERVERS, 65536, 1, 2.779),
    Measured(SERVERS, 8192, 64, 5.605, hybrid=True, scores_all=False),
    Measured(SERVERS, 8192, 1, 2.276, hybrid=True),
    Measured(SERVERS, 16384, 64, 5.547, hybrid=True, scores_all=False),
    Measured(SERVERS, 16384, 1, 2.268, hybrid=True),
    Measured(SERVERS, 32768, 62, 5.762, hybrid=True, scores_all=False),
    Measured(SERVERS, 32768, 1, 2.415, hybrid=True),
    Measured(SERVERS, 65536, 31, 4.007, hybrid=True, scores_all=False),
    Measured(SERVERS, 65536, 1, 2.742, hybrid=True),
    Measured(CODE_SERVERS, 32768, 8, 4.547),
    Measured(CODE_SERVERS, 65536, 4, 4.564),
    Measured(CODE_SERVERS, 65536, 1, 2.775),
    Measured(CODE_SERVERS, 32768, 77, 6.337, hybrid=True, most_rows=77),
    Measured(CODE_SERVERS, 32768, 1, 2.409, hybrid=True, most_rows=77),
    Measured(CODE_SERVERS, 65536, 39, 5.263, hybrid=True, most_rows=77),
    Measured(CODE_SERVERS, 65536, 1, 2.734, hybrid=True, most_rows=77),
    _qwen(5.803),
    _qwen(6.412, _NO_LATE),
    _qwen(5.431, _EVERY_STEP, "scout.cpu_share=0.5", _NO_LATE),
    _qwen(5.826, _EVERY_STEP, "scout.cpu_share=0", _NO_LATE),
    _qwen(5.402, _EVERY_STEP, _NO_LATE),
    _qwen(5.219, "scout.cpu_share=0.5", _NO_LATE),
    _qwen(5.149, _EVERY_STEP, "scout.cpu_share=0.75", _NO_LATE),
    _qwen(5.84, _EVERY_STEP, "scout.cpu_share=0.5", _NO_LATE, "scout.resident_bonus=0.5"),
)

_SHARED = "rows share 8 prompts, so caches help (the file's notes); 8 unshared rows of 32k, as many bytes, take 4.57 ms"
_ABLATION = "a part of the backend was switched off"
_DISTURBED = "another program took the host's cores"
LEFT_OUT = {  # estimates assume that nothing else runs, that rows share no prompts and that no part is switched off
    Measured(SERVERS, 8192, 32, 3.438): _SHARED,
    Measured(SERVERS, 16384, 16, 3.887): _SHARED,
    Measured(CODE_SERVERS, 32768, 1, 3.07): _DISTURBED,
    Measured(SERVERS, 32768, 62, 13.595, hybrid=True, variant="no prediction"): _ABLATION,
    Measured(SERVERS, 32768, 62, 12.442, hybrid=True, variant="+ prediction"): _ABLATION,
    Measured(SERVERS, 32768, 62, 5.252, hybrid=True, variant="+ recall"): _ABLATION,
}

MOST_ROWS = max(one.rows for one in RESULTS if one.hybrid)


def error_ranges(*, hybrid: bool) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest relative error per file, of the hybrid or of the stock results."""
    ranges: dict[str, tuple[float, float]] = {}
    for one in (one for one in RESULTS if one.hybrid == hybrid):
        lowest, highest = ranges.get(one.file, (one.error, one.error))
        ranges[one.file] = min(lowest, one.error), max(highest, one.error)
    return ranges
