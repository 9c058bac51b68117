"""Sizes of the experiments (tiny, small, full): every number of a size in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS

_SPARE_TOKENS = 64
_WARM_STEPS = FIRST_STEPS + 1  # a row's first steps do more work than all others, so they are not timed


@dataclass(frozen=True)
class Size:
    """Tokens, rows and steps of all experiments."""

    # accuracy: windows of a text, prompt tokens of each window and tokens decoded after the prompt
    windows: int
    prompt_tokens: int
    decode_tokens: int
    budget: int  # in tokens, for experiments with one budget
    budgets: tuple[int, ...]
    # needles
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    repeats: int
    # CPU compute ratio
    ratio_steps: int
    # cosines
    fit_windows: int
    fit_tokens: int
    calibrates: int  # 1: the ablation includes a calibrated predictor, whose fit takes minutes on a CPU
    # speed: a sweep over prompt lengths, then a sweep over batches of one length
    speed_lengths: tuple[int, ...]
    speed_rows: int  # rows in the sweep over lengths
    batches: tuple[int, ...]
    batch_length: int
    speed_budget: int
    speed_steps: int
    warm_steps: int
    # one long answer
    rate_prompt: int
    rate_steps: int
    rate_window: int  # tokens in HGCA's dense window
    # HCAttention
    taus: tuple[float, ...]
    # HGCA
    ratios: tuple[float, ...]
    betas: tuple[float, ...]

    def within(self, context: int) -> Size:
        """Return this size with lengths and budgets reduced to fit a model with ``context`` tokens."""
        most = context - _SPARE_TOKENS
        prompt = min(self.prompt_tokens, most - max(self.decode_tokens, self.ratio_steps))
        return dataclasses.replace(
            self,
            prompt_tokens=prompt,
            budget=_fitting(self.budget, prompt),
            budgets=tuple(sorted({_fitting(budget, prompt) for budget in self.budgets})),
            lengths=tuple(sorted({min(length, most) for length in self.lengths})),
            fit_tokens=min(self.fit_tokens, most),
            speed_lengths=tuple(sorted({min(length, most - self._speed_tokens) for length in self.speed_lengths})),
            batch_length=min(self.batch_length, most - self._speed_tokens),
            rate_steps=min(self.rate_steps, most - self.rate_prompt),
        )

    @property
    def _speed_tokens(self) -> int:
        return self.speed_steps + self.warm_steps

    @property
    def text_tokens(self) -> int:
        """Number of KV cache tokens that the accuracy experiments need at once."""
        text = self.windows * (self.prompt_tokens + max(self.decode_tokens, self.ratio_steps) + _SPARE_TOKENS)
        return max(text, 4 * (max(self.lengths, default=0) + 2 * _SPARE_TOKENS), self.fit_tokens)

    @property
    def speed_tokens(self) -> int:
        each = self._speed_tokens + 2 * _SPARE_TOKENS
        lengths = self.speed_rows * (max(self.speed_lengths) + each)
        return max(lengths, max(self.batches) * (self.batch_length + each), self.rate_prompt + self.rate_steps + each)

    def changed(self, settings: Sequence[str]) -> Size:
        """Return this size with NAME=VALUE settings applied (lists with commas). Raise InputError for a wrong one."""
        changes: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = setting.partition("=")
            if not equals or name not in self.__dataclass_fields__:
                names = ", ".join(self.__dataclass_fields__)
                raise InputError(f"--set {setting}: NAME=VALUE is needed, and the names are {names}")
            changes[name] = _parsed(setting, text, getattr(self, name))
        return dataclasses.replace(self, **changes)


def _parsed(setting: str, text: str, like: Any) -> Any:
    """Return ``text`` as a number, or as a tuple of numbers if ``like`` is a tuple. Raise InputError otherwise."""
    kind = type(like[0]) if isinstance(like, tuple) else type(like)
    try:
        values = tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise InputError(f"--set {setting}: {kind.__name__} is needed, or several with commas") from None
    if not values or min(values) < 0 or (not isinstance(like, tuple) and len(values) > 1):
        raise InputError(f"--set {setting}: one number is needed, >= 0, and several where --list shows several")
    return values if isinstance(like, tuple) else values[0]


def _fitting(budget: int, prompt: int) -> int:
    """Return ``budget`` reduced below ``prompt`` tokens: with a budget above the prompt, nothing is selected."""
    return min(budget, max(160, prompt // 2 // 32 * 32))


_FIFTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TENTHS = tuple(n / 9 for n in range(10))

SIZES = {
    "tiny": Size(
        windows=2, prompt_tokens=704, decode_tokens=29, budget=224, budgets=(160, 224, 320),
        lengths=(512, 768), depths=(0.1, 0.5, 0.9), repeats=1, ratio_steps=36, fit_windows=4, fit_tokens=256,
        calibrates=0,
        speed_lengths=(256, 512), speed_rows=1, batches=(1, 2, 4), batch_length=128, speed_budget=224,
        speed_steps=6, warm_steps=_WARM_STEPS, rate_prompt=64, rate_steps=128, rate_window=96,
        taus=(0.3, 0.5, 0.7, 0.9, 1.0), ratios=(0.25, 0.5), betas=(0.25, 1.0),
    ),
    "small": Size(
        windows=4, prompt_tokens=3072, decode_tokens=49, budget=512, budgets=(256, 512, 1024),
        lengths=(1024, 2048, 4096), depths=_FIFTHS, repeats=1, ratio_steps=128, fit_windows=6, fit_tokens=1024,
        calibrates=1,
        speed_lengths=(512, 1024, 2048, 4096), speed_rows=1, batches=(1, 2, 4, 8), batch_length=1024, speed_budget=512,
        speed_steps=24, warm_steps=_WARM_STEPS, rate_prompt=64, rate_steps=2048, rate_window=512,
        taus=(0.3, 0.5, 0.7, 0.9, 1.0), ratios=(0.25, 0.5, 0.75),
        betas=(0.25, 0.5, 0.75, 1.0),
    ),
    "full": Size(
        windows=8, prompt_tokens=30000, decode_tokens=128, budget=2048, budgets=(1024, 2048, 4096),
        lengths=(4096, 8192, 16384, 32000), depths=_TENTHS, repeats=2, ratio_steps=256, fit_windows=6, fit_tokens=4096,
        calibrates=1,
        speed_lengths=(8192, 16384, 32768, 65536), speed_rows=4, batches=(16, 32, 40, 64), batch_length=32768,
        speed_budget=2048, speed_steps=64, warm_steps=_WARM_STEPS, rate_prompt=64, rate_steps=16384, rate_window=4096,
        taus=(0.3, 0.5, 0.7, 0.9, 1.0),
        ratios=(0.25, 0.5, 0.75), betas=(0.25, 0.5, 0.75, 1.0),
    ),
}  # fmt: skip
