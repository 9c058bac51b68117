"""Perplexity, KL and retrieval of several settings after one prefill: ``sglang-hybrid eval`` for a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang_hybrid.commands.eval.comparison import compare
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt, TextPrompt
from sglang_hybrid.commands.eval.result import Run
from sglang_hybrid.commands.eval.running import Evaluation, Variant, batches, cost
from sglang_hybrid.commands.report.session.loaded import Loaded
from sglang_hybrid.commands.report.session.messages import Tell
from sglang_hybrid.commands.report.session.prompts import retrieval_prompts, text_prompts
from sglang_hybrid.config import ConfigError, load_config
from sglang_hybrid.integration.refusals import Refusal

BASELINE = "full attention"
# the few prompts of a batch fit in GPU memory, where whole requests would make every policy exact
_ALWAYS = ("whole_requests=never",)


def evaluate(
    session: Loaded,
    *,
    tell: Tell,
    variants: Sequence[tuple[str, Sequence[str]]],
    windows: int = 0,
    prompt_tokens: int = 0,
    decode_tokens: int = 0,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = (),
    repeats: int = 1,
    tasks: Sequence[str] = ("needle",),
) -> dict[str, Any]:
    """Evaluate full attention and all ``variants``, (name, settings) pairs, on the same prompts.

    A variant that this model or engine refuses is left out and listed under ``refused`` with the reason.
    """
    usable, refused = _usable(session, variants)
    texts: list[RetrievalPrompt | TextPrompt] = []
    if windows:
        texts += text_prompts(session, windows, prompt_tokens, decode_tokens)
    # retrieval first, so that the text stays in the KV cache for the next measurement
    prompts = [*retrieval_prompts(session, lengths, depths, repeats, tasks), *texts]
    groups = batches(prompts, session.model.capacity_tokens)
    evaluation = Evaluation(session, usable, _Bar(tell, sum(cost(group, len(usable)) for group in groups)))
    for group in groups:
        evaluation.measure(group)
    runs = evaluation.runs()
    return {"runs": [_entry(runs[0], run) for run in runs], "refused": refused}


def _usable(session: Loaded, variants: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[Variant], dict[str, str]]:
    usable = [Variant(BASELINE, {"policy": "full"}, load_config(None, ["policy=full"]))]
    refused = {}
    for name, settings in variants:
        try:
            config = load_config(None, [*_ALWAYS, *settings])
            session.use(config)
        except (ConfigError, Refusal, ValueError) as error:  # a policy that cannot be created raises ValueError
            refused[name] = str(error)
        else:
            usable.append(Variant(name, dict(one.partition("=")[::2] for one in settings), config))
    return usable, refused


def _entry(baseline: Run, run: Run) -> dict[str, Any]:
    beside = compare(baseline, run)
    change = None if run is baseline or beside.perplexity is None else asdict(beside.perplexity)
    return {
        "name": run.name,
        "settings": [f"{key}={value}" for key, value in run.settings.items()],
        "perplexity": run.perplexity,
        "perplexity_change": change,  # relative to full attention, 0.01 is 1 % more; with a 95 % interval
        "kl_mean": run.kl_mean,
        "kl_p95": run.kl_p95,
        "top1_agreement": run.top1_agreement,
        "cpu_ratio": run.cpu_ratio,
        "tasks": {task.task: {"score": task.score, "prompts": len(task.scores)} for task in run.tasks},
        "needle": asdict(run.needle) if run.needle else None,
    }


class _Bar:
    """Progress bar of an evaluation: converts costs to shares of 1 and sends them to the report."""

    def __init__(self, tell: Tell, total: float) -> None:
        self._tell, self._total, self._text = tell, max(total, 1.0), ""

    def say(self, text: str) -> None:
        self._text = text
        self._tell(text, 0.0)

    def advance(self, cost: float) -> None:
        self._tell(self._text, cost / self._total)
