"""Settings of policy hcattention. This module imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class HCAttentionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How keys are kept on the device, and which tokens are attended."""

    tau: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Attention mass per query head that attended tokens reach together; 1 attends to all.",
        ),
    ] = 0.9
    codebook: Annotated[
        str,
        Meta(
            description="Codebooks of the keys, made by sglang-hybrid profile --codebook; none keeps whole keys.",
            extra={"legal": '"none" or a file'},
        ),
    ] = "none"
    renormalise: Annotated[
        bool,
        Meta(description="Whether weights of attended tokens add up to 1; false is the paper's equation 5."),
    ] = True
