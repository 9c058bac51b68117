"""Variants: what decode steps attend to, and what stands for the blocks that are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.policies.scout.tuning import FIRST_SHARE


@dataclass(frozen=True)
class Variant:
    """One way to decode. The defaults are those of a server that calibrates at its start."""

    # Minimum estimated attention of a block without a slot that a first step reads; 0: all blocks, None: none
    first_share: float | None = FIRST_SHARE
    bias: Literal["predicted", "real", "none"] = "predicted"  # query of the bias of sink, recent and tail blocks
    bias_part: float = 1.0  # factor of the bias
    # The mean of the prompt's values gets this part of the estimated attention of the blocks that are left out
    mean_part: float = 0.0
    slot_codes: bool = True  # slots have codes of 8 bits, otherwise the model's dtype


VARIANTS = {
    "served": Variant(),
    "share-0.0005": Variant(first_share=0.0005),
    "share-0.0001": Variant(first_share=0.0001),
    "no-bias": Variant(bias="none"),
    "real-bias": Variant(bias="real"),
    "mean": Variant(bias="none", mean_part=1.0),
    "half-mean": Variant(bias="real", bias_part=0.5, mean_part=0.5),
    "slots-of-16-bits": Variant(slot_codes=False),
    "selection-alone": Variant(first_share=None),
}


def variants_of(names: str) -> dict[str, Variant]:
    """Return the variants named in ``names``, separated by commas. Raise InputError for a name that does not exist."""
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise InputError(f"--variants {', '.join(unknown)}: there are {', '.join(VARIANTS)}")
    return {name: VARIANTS[name] for name in chosen}
