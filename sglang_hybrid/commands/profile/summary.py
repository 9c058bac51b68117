"""Prints a profile as a table, and draws its CPU compute ratios as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_hybrid.policies.scout.profile import Profile, ProfileFacts


def print_summary(profile: Profile, console: Console) -> None:
    facts = profile.facts
    table = Table(title=f"{facts.model.architecture}, budget {facts.budget_tokens} tokens, beta {facts.beta:.0%}")
    names = ("layer", "cosine raw", "calibrated", "rank", "blocks new per step", "resident bonus", "miss share")
    for name in (*names, "recall every"):
        table.add_column(name, justify="right")
    without, with_recall = (curve.ratios for curve in facts.curves) if len(facts.curves) == 2 else ([], [])
    if without:
        table.add_column("CPU ratio without recall, last steps", justify="right")
        table.add_column("with", justify="right")
    for layer in range(facts.model.layers):
        row = [
            str(layer), f"{facts.cosine_raw[layer]:.3f}", f"{facts.cosine_calibrated[layer]:.3f}",
            str(facts.ranks[layer]), f"{facts.block_change[layer]:.1%}", f"{facts.bonus[layer]:g}",
            f"{facts.miss_shares[layer]:.2%}" if facts.miss_shares else "", str(facts.intervals[layer]),
        ]  # fmt: skip
        if without:
            row += [f"{_end(without[layer]):.1%}", f"{_mean(with_recall[layer]):.1%}"]
        table.add_row(*row)
    console.print(table)
    for line in _lines(profile):
        console.print(line)


def _lines(profile: Profile) -> list[str]:
    facts = profile.facts
    predicted = slice(1, None)  # the first layer's query is never predicted
    raw, calibrated = facts.cosine_raw[predicted], facts.cosine_calibrated[predicted]
    memory = sum(
        tensor.numel() * tensor.element_size()
        for one in profile.corrections.values()
        for tensor in (one.left, one.right, one.bias)
        if tensor is not None
    )
    lines = [
        f"cosine of predicted and real query: raw {_mean(raw):.3f} (worst layer {min(raw):.3f}), "
        f"calibrated {_mean(calibrated):.3f} ({min(calibrated):.3f}), on text that was not fitted on",
        f"the correction takes {memory / 2**20:.1f} MiB",
        f"host: reads {facts.rates.read_gb_s} GB/s, block attention {facts.rates.attention_gb_s} GB/s with "
        f"{facts.rates.threads} threads"
        + (f", transfer {facts.rates.transfer_gb_s} GB/s" if facts.rates.transfer_gb_s else ""),
    ]
    lines += [
        f"CPU compute ratio {curve.name}: mean {_mean(curve.mean()):.1%}, last steps {_end(curve.mean()):.1%}"
        for curve in facts.curves
    ]
    return lines


def write_plot(profile: Profile, path: Path) -> Path:
    from sglang_hybrid.commands.eval.plots import ratio_curves

    facts: ProfileFacts = profile.facts
    means = {curve.name: curve.mean() for curve in facts.curves}
    steps = list(range(1, 1 + max((len(mean) for mean in means.values()), default=0)))
    ratio_curves(path, steps, means, facts.beta)
    return path


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _end(values: list[float]) -> float:
    """Return the mean of the last sixteenth of ``values``, because single steps vary."""
    return _mean(values[-max(1, len(values) // 16) :])
