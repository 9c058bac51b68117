"""Settings of policy infinigen. This module imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_COLUMNS_MULTIPLE = 4  # eight bytes of a 16-bit dtype: what a kernel reads at once
COLUMN_BYTES = 2  # partial keys are kept in 16 bits


class InfinigenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns of keys logits are speculated from, and what is selected."""

    alpha: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="Tokens are selected whose speculated logit is less than this below the highest; as many as "
            "a layer's KV heads want on average, and budget_tokens at most.",
            extra={"legal": "a number >= 0"},
        ),
    ] = 4.0
    partial_ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the columns of skewed keys that are kept on the model's device.",
        ),
    ] = 0.3
    unit: Annotated[
        Literal["tokens", "blocks"],
        Meta(description="What is selected: tokens, as in the paper, or blocks by their best token."),
    ] = "tokens"


def partial_columns(partial_ratio: float, head_dim: int) -> int:
    """Return the number of columns of a skewed key that are kept: about ``partial_ratio`` of them, a multiple of 4."""
    rounded = round(partial_ratio * head_dim / _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE
    return min(head_dim, max(_COLUMNS_MULTIPLE, rounded))
