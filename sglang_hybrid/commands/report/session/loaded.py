"""A model session that remembers its prefilled prompts, so that consecutive measurements share one prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_hybrid.commands.report.session.load import Load
from sglang_hybrid.integration.model_session import ModelSession, Prefilled

Ids = tuple[int, ...]


class Loaded:
    """A loaded model for measurements, with the methods that ``sglang-hybrid eval`` needs of a session."""

    def __init__(self, model: ModelSession, load: Load, *, on_gpu: bool) -> None:
        self.model, self.load, self.on_gpu = model, load, on_gpu
        self._held: tuple[tuple[Ids, ...], Prefilled] | None = None

    def use(self, config: Any) -> None:
        self.model.use(config)

    def watch_ratio(self, watcher: Callable[[int, float], None] | None) -> None:
        self.model.watch_ratio(watcher)

    def text(self, ids: Sequence[int]) -> str:
        return self.model.text(ids)

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.model.end_tokens

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None] = lambda _part: None
    ) -> Prefilled:
        """Prefill ``prompts``, unless they are those of the last call. Callers must rewind before they decode."""
        wanted = tuple(map(tuple, prompts))
        if self._held is None or self._held[0] != wanted:
            self._held = None
            self._held = (wanted, self.model.prefill(prompts, progress))
        else:
            progress(1.0)
        return self._held[1]

    def prefill_in_turn(self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None]) -> Prefilled:
        self._held = None
        return self.model.prefill_in_turn(prompts, progress)

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.on_gpu:
            torch.cuda.synchronize()
