"""Settings of policy hgca. This module imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_hybrid.blocks import BLOCK_TOKENS

_LEAST_WINDOW = 2 * BLOCK_TOKENS  # the block being filled, and one before it


class HgcaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How large the dense window is, and which older tokens are salient."""

    window_tokens: Annotated[
        int,
        Meta(
            ge=_LEAST_WINDOW,
            le=10**9,
            multiple_of=BLOCK_TOKENS,
            description="Newest tokens of a request that are attended densely.",
            extra={"legal": f"a multiple of {BLOCK_TOKENS}, >= {_LEAST_WINDOW}"},
        ),
    ] = 4096
    window_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of a request's tokens that the window holds, if more than window_tokens.",
        ),
    ] = 0.0
    alpha: Annotated[
        float,
        Meta(gt=0, le=1, description="Factor of the newest attention weight in a token's moving average."),
    ] = 0.1
    beta: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="A token that leaves the window stays attended if its average weight is more than beta times "
            "the mean. 0 attends to everything.",
            extra={"legal": "a number >= 0"},
        ),
    ] = 1.0
