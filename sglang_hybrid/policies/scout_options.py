"""The settings of policy scout: the section ``scout`` of the configuration. Imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Upper bounds keep numbers within what kernels and tensors hold. Nobody comes near: the words leave them out.
_Count = Annotated[int, Meta(ge=0, le=10**9, extra={"legal": "a whole number >= 0"})] | Literal["auto"]
_Bonus = Annotated[float, Meta(ge=0, le=1e9, extra={"legal": "a number >= 0"})] | Literal["auto"]
_Share = Annotated[float, Meta(ge=0, le=1)] | Literal["auto"]


class ScoutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is selected, what stays resident, who computes misses, and when recalls are due."""

    resident_tokens: Annotated[
        _Count,
        Meta(
            description="Tokens per (request, layer, KV head) that are kept resident, sink, recent and tail blocks "
            "included; those are resident in any case. auto is budget_tokens; 0 leaves all others to the worker.",
        ),
    ] = "auto"
    selection: Annotated[
        Literal["head", "layer"],
        Meta(description="Whether each KV head has its own selection, or all KV heads of a layer share one."),
    ] = "head"
    attend: Annotated[
        Literal["resident", "selected"],
        Meta(
            description="What is attended besides misses, sink, recent and tail blocks: all resident blocks, or only "
            "those that are selected in this step, so that budget_tokens bounds what is attended (ScoutAttention)."
        ),
    ] = "resident"
    resident_bonus: Annotated[
        _Bonus,
        Meta(
            description="What resident blocks get on top of their score, in attention logits, so that blocks of nearly "
            "equal scores do not swap at every token. 0 is none; auto takes the profile's, or 1 without a profile.",
        ),
    ] = "auto"
    min_miss_attention: Annotated[
        _Share,
        Meta(
            description="Attention that a selected block must be estimated to get, as a share of its KV head's, to be "
            "computed by the worker. One that is not resident and gets less is left out until a recall. 0 leaves out "
            "none; auto takes the profile's share of each layer and computes every block that gets it, selected or "
            "not (with attend resident), or 0.001 without a profile.",
        ),
    ] = "auto"
    lse_shift: Annotated[
        bool,
        Meta(
            description="Whether the weight of what was computed with a predicted query is corrected once the real "
            "query is there, by what digests and sketches tell of both.",
        ),
    ] = True
    cpu_share: Annotated[
        _Share,
        Meta(
            description="Share of the misses that the worker computes on a GPU server; the others, those with the best "
            "scores, are copied to the GPU and attended there with the real query. 1 is ScoutAttention, 0 leaves the "
            "worker what the GPU has no room for; auto copies only what the worker cannot compute in time.",
        ),
    ] = "auto"
    score_interval: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | Literal["auto"],
        Meta(
            description="Decode steps between two scorings of all of a layer's blocks, up to 16. In between, hot "
            "blocks are scored (hot_tokens), so a cold one that becomes important is noticed that much later; resident "
            "blocks are attended to anyway, with the real query. auto: 4 where a GPU scores, which "
            "then reads less than half as much of contexts of 16 budgets and more, and 1 elsewhere.",
        ),
    ] = "auto"
    hot_tokens: Annotated[
        _Count,
        Meta(
            description="With score_interval above 1: the tokens of each (row, layer, KV head) whose blocks are scored "
            "at every step, those with the best scores when all were scored. auto: four times the budget. 0: none.",
        ),
    ] = "auto"
    recall_interval: Annotated[
        _Count,
        Meta(
            description="Decode steps between two recalls of a layer, which make its selection resident. 0 is never; "
            "auto takes the profile's, or 8 without a profile.",
        ),
    ] = "auto"
    target_cpu_ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="The CPU compute ratio (misses over budget) that recall keeps: profiles choose intervals by "
            "it, and recall_adapt holds it.",
        ),
    ] = 0.12
    recall_adapt: Annotated[
        bool,
        Meta(
            description="Whether recall intervals follow live traffic when its ratio leaves the band below "
            "target_cpu_ratio. Intervals that are set by recall_interval stay as they are.",
        ),
    ] = True
