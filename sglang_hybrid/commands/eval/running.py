"""Decodes every prompt with every variant of the settings after one shared prefill, and measures the results.

Prefill is exact and the same for all variants, so it runs once. The first token after a prompt comes from prefill.
Perplexity, KL, agreement and CPU ratio are measured on decode steps only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from sglang_hybrid.commands.eval.prompts import RetrievalPrompt, TextPrompt
from sglang_hybrid.commands.eval.result import Run
from sglang_hybrid.commands.eval.scoring import Answered, kl_summary, mean, needle_grid, perplexity, task_results
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration.session_flags import MOST_ROWS
from sglang_hybrid.progress import DECODE_STEP_COST


@dataclass(frozen=True)
class Variant:
    name: str
    settings: dict[str, object]  # those that differ from the defaults, as the user gave them
    config: HybridConfig


class PrefilledPrompts(Protocol):
    logits: torch.Tensor  # [prompts, vocabulary], for the token after each prompt

    def rewind(self) -> None: ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor: ...


class Session(Protocol):
    """A loaded model; ``integration.model_session.ModelSession`` has this interface."""

    def use(self, config: HybridConfig) -> None: ...

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None]) -> PrefilledPrompts: ...

    def watch_ratio(self, watcher: Callable[[int, float], None] | None) -> None: ...

    def text(self, ids: Sequence[int]) -> str: ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...


class Bar(Protocol):
    """Progress bar over the costs of all groups; ``progress.Steps`` has this interface."""

    def say(self, text: str) -> None: ...

    def advance(self, cost: float) -> None: ...


class Measurements:
    """The measurements of one variant so far."""

    def __init__(self) -> None:
        self.logprobs: list[list[float]] = []  # [text prompts][decode steps]
        self.kl: list[float] = []
        self.agrees: list[float] = []
        self.answered: list[Answered] = []
        self.ratios: list[float] = []  # CPU compute ratio of each layer at each step

    def add(self, other: Measurements) -> None:
        self.logprobs += other.logprobs
        self.kl += other.kl
        self.agrees += other.agrees
        self.answered += other.answered
        self.ratios += other.ratios

    def run(self, variant: Variant) -> Run:
        everything = [one for prompt in self.logprobs for one in prompt]
        kl = kl_summary(self.kl) if self.kl else None
        return Run(
            name=variant.name,
            settings=variant.settings,
            tasks=task_results(self.answered),
            perplexity=perplexity(everything) if everything else None,
            loss_by_prompt=tuple(-mean(prompt) for prompt in self.logprobs),
            kl_mean=kl.mean if kl else None,
            kl_p95=kl.p95 if kl else None,
            top1_agreement=mean(self.agrees) if self.agrees else None,
            cpu_ratio=mean(self.ratios) if self.ratios else None,
            needle=needle_grid(self.answered),
            answers=tuple(one.kept() for one in self.answered),
        )


class Evaluation:
    """Runs all variants on all prompts. The first variant is the baseline for the others."""

    def __init__(self, session: Session, variants: Sequence[Variant], bar: Bar) -> None:
        self._session = session
        self._variants = variants
        self._bar = bar
        self._seen: dict[str, Measurements] = defaultdict(Measurements)
        self._of_group: dict[str, Measurements] = defaultdict(Measurements)
        self.measured = 0  # prompts, by all variants

    def runs(self) -> list[Run]:
        return [self._seen[variant.name].run(variant) for variant in self._variants]

    def check(self) -> None:
        """Apply every variant once, so that a variant that cannot be used raises before the others are measured."""
        for variant in self._variants:
            self._session.use(variant.config)

    def measure(self, group: Sequence[RetrievalPrompt | TextPrompt]) -> None:
        """Measure prompts of one type with all variants. If this is interrupted, none of these prompts counts."""
        self._of_group.clear()
        if isinstance(group[0], TextPrompt):
            self._texts([one for one in group if isinstance(one, TextPrompt)])
        else:
            self._retrieval([one for one in group if not isinstance(one, TextPrompt)])
        for name, seen in self._of_group.items():
            self._seen[name].add(seen)
        self.measured += len(group)

    def _texts(self, prompts: Sequence[TextPrompt]) -> None:
        """Measure perplexity, and KL to the first variant. The text itself is decoded, whatever a variant predicts."""
        prefilled = self._prefill("text", prompts)
        following = torch.tensor([prompt.following for prompt in prompts])
        reference: list[torch.Tensor] = []
        for variant, seen in self._in_turn("text", prefilled):
            logprobs = []
            for step in range(following.shape[1] - 1):
                predicted = prefilled.step(following[:, step]).log_softmax(dim=1)
                self._bar.advance(len(prompts) * DECODE_STEP_COST)
                logprobs.append(predicted.gather(1, following[:, step + 1 :][:, :1].to(predicted.device))[:, 0])
                if variant is self._variants[0]:
                    reference.append(predicted)
                    continue
                exact = reference[step]
                seen.kl += (exact.exp() * (exact - predicted)).sum(dim=1).tolist()
                seen.agrees += (exact.argmax(dim=1) == predicted.argmax(dim=1)).float().tolist()
            seen.logprobs += torch.stack(logprobs, dim=1).tolist()

    def _retrieval(self, prompts: Sequence[RetrievalPrompt]) -> None:
        """Decode a greedy answer to each prompt, up to the token that ends the answer or to ``new_tokens``."""
        prefilled = self._prefill(prompts[0].task, prompts)
        longest = max(prompt.new_tokens for prompt in prompts)
        for _, seen in self._in_turn(prompts[0].task, prefilled):
            said: list[list[int]] = [[] for _ in prompts]
            tokens = prefilled.logits.argmax(dim=1)
            for step in range(longest):
                for ids, token in zip(said, tokens.tolist(), strict=True):
                    ids.append(token)
                left = longest - 1 - step
                if not left or all(map(self._has_ended, said, prompts)):
                    self._bar.advance(left * len(prompts) * DECODE_STEP_COST)
                    break
                tokens = prefilled.step(tokens).argmax(dim=1)
                self._bar.advance(len(prompts) * DECODE_STEP_COST)
            seen.answered += [
                Answered(prompt, self._session.text(self._answer(ids, prompt)))
                for prompt, ids in zip(prompts, said, strict=True)
            ]

    def _has_ended(self, ids: list[int], prompt: RetrievalPrompt) -> bool:
        return len(ids) >= prompt.new_tokens or len(self._answer(ids, prompt)) < len(ids)

    def _answer(self, ids: list[int], prompt: RetrievalPrompt) -> list[int]:
        """Return the tokens that a server would answer: those before the token that ends the answer."""
        ends = self._session.end_tokens
        return list(takewhile(lambda token: token not in ends, ids[: prompt.new_tokens]))

    def _prefill(self, task: str, prompts: Sequence[RetrievalPrompt | TextPrompt]) -> PrefilledPrompts:
        tokens = sum(len(prompt.ids) for prompt in prompts)
        self._bar.say(f"{task}: prefill of {tokens} tokens")
        return self._session.prefill([prompt.ids for prompt in prompts], lambda part: self._bar.advance(part * tokens))

    def _in_turn(self, task: str, prefilled: PrefilledPrompts) -> Iterator[tuple[Variant, Measurements]]:
        for variant in self._variants:
            seen = self._of_group[variant.name]
            self._bar.say(f"{task}: {variant.name}")
            self._session.use(variant.config)
            self._session.watch_ratio(lambda _layer, ratio, seen=seen: seen.ratios.append(ratio))  # type: ignore[misc]
            prefilled.rewind()
            yield variant, seen


def cost(group: Sequence[RetrievalPrompt | TextPrompt], variants: int) -> float:
    """Return the cost of one group in prefilled tokens: how far its prefill and decode steps advance the bar."""
    steps = max(map(new_tokens, group)) - 1  # the first token comes from prefill
    return sum(len(prompt.ids) for prompt in group) + variants * steps * len(group) * DECODE_STEP_COST


def batches(prompts: Sequence[RetrievalPrompt | TextPrompt], tokens: int) -> list[list[RetrievalPrompt | TextPrompt]]:
    """Group neighbours of one type that are prefilled together, at most ``tokens`` tokens and ``MOST_ROWS`` prompts."""
    groups: list[list[RetrievalPrompt | TextPrompt]] = []
    used = 0
    for prompt in prompts:
        needed = len(prompt.ids) + new_tokens(prompt) + 64  # in reserve: the last pages of a row are not full
        together = bool(groups) and type(groups[-1][0]) is type(prompt) and len(groups[-1]) < MOST_ROWS
        together = together and used + needed <= tokens
        if not together:
            groups.append([])
            used = 0
        groups[-1].append(prompt)
        used += needed
    return groups


def new_tokens(prompt: RetrievalPrompt | TextPrompt) -> int:
    return prompt.new_tokens if isinstance(prompt, RetrievalPrompt) else len(prompt.following)
