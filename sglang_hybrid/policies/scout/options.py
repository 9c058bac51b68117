"""Settings of policies scout and scoutattention. This module imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Upper bounds keep numbers within what kernels and tensors can hold. They are far off, so descriptions omit them.
_Count = Annotated[int, Meta(ge=0, le=10**9, extra={"legal": "a whole number >= 0"})] | Literal["auto"]
_Bonus = Annotated[float, Meta(ge=0, le=1e9, extra={"legal": "a number >= 0"})] | Literal["auto"]
_Share = Annotated[float, Meta(ge=0, le=1)] | Literal["auto"]


class ScoutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is selected, what stays resident, who computes misses, and when recalls are due."""

    resident_tokens: Annotated[
        _Count,
        Meta(
            description="Tokens per (request, layer, KV head) that stay resident, sink, recent and tail blocks "
            "included. auto is budget_tokens; with 0 only those blocks stay.",
        ),
    ] = "auto"
    slot_dtype: Annotated[
        Literal["auto", "int8", "model"],
        Meta(
            description="Storage of resident blocks in GPU memory: that of the KV cache, or int8, in half of a 16-bit "
            "cache's memory, by ranges that a calibration or profile has. auto is int8 where the server calibrates.",
        ),
    ] = "auto"
    resident_bonus: Annotated[
        _Bonus,
        Meta(
            description="Added to the score of resident blocks, in attention logits, so that nearly equal blocks do"
            " not swap at every token. auto is the profile's, or 1.",
        ),
    ] = "auto"
    min_miss_attention: Annotated[
        _Share,
        Meta(
            description="Least estimated share of the KV head's attention with which a selected block becomes a miss; "
            "a block with less waits for a recall. auto is the profile's share of each layer, for blocks that are not "
            "selected too, or 0.001 without a profile.",
        ),
    ] = "auto"
    cpu_share: Annotated[
        _Share,
        Meta(
            description="Share of the misses that the worker computes on a GPU server; the others, with the best "
            "scores, are copied to the GPU. auto copies what PCIe brings in time.",
        ),
    ] = "auto"
    recall_interval: Annotated[
        _Count,
        Meta(
            description="Decode steps between two recalls of a layer. 0 is never; auto is the profile's, or else 32 "
            "where misses are copied to a GPU (cpu_share) and 8 elsewhere.",
        ),
    ] = "auto"
    target_cpu_ratio: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | Literal["auto"],
        Meta(
            description="CPU compute ratio (misses over budget) that recall_adapt aims at. auto is, on a GPU, what "
            "the worker computes in 60 % of a layer's time, at least 3 % and at most 25 %, and 12 % elsewhere.",
        ),
    ] = "auto"
    recall_adapt: Annotated[
        bool,
        Meta(
            description="Whether recall intervals follow traffic, to keep the ratio below target_cpu_ratio, where no "
            "misses are copied to a GPU (cpu_share). A recall_interval that is set stays.",
        ),
    ] = True


class ScoutAttentionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of policy scoutattention."""

    resident_tokens: Annotated[
        _Count,
        Meta(
            description="As scout.resident_tokens.",
        ),
    ] = "auto"
    recall_interval: Annotated[
        _Count,
        Meta(
            description="As scout.recall_interval.",
        ),
    ] = "auto"
    target_cpu_ratio: Annotated[
        float,
        Meta(gt=0, le=1, description="CPU compute ratio that recall_adapt keeps to: the paper's beta."),
    ] = 0.12
    recall_adapt: Annotated[
        bool,
        Meta(description="As scout.recall_adapt."),
    ] = False
