"""Attention by codes of keys on the GPU: weights of kept tokens, lists of their blocks, and sums of their values.

Policy ``hcattention`` is the specification. The weights of a step are in one buffer ``[B, H, G, max_blocks, 32]``. The
buffer holds logits at first, then weights, which are 0 for tokens that are not kept. Lists also hold each block's
position in the row, so posts and kernels find a block's weights in the buffer, and weights need not be copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.ops.cuda.key_codes import QuantisedCodes
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, active_address, address, dtype_code, scalar_address

SHARE_UNITS = 1 << 20  # units of ``counted`` in a whole row; kept_share_units in keep_tokens.cuh
_CTAS = 256  # desired CTAs of a launch: enough reads in flight to saturate PCIe
_MOST_SPLITS = 32


@dataclass(frozen=True)
class KeptTokens:
    """Weights of all tokens of a step's rows, and lists of the blocks that have a token with a weight above 0."""

    weights: torch.Tensor  # [B, H, G, max_blocks, 32] float32
    pages: torch.Tensor  # [B, H, max_blocks] int32, of which the first `counts` are valid
    positions: torch.Tensor  # same shape: position of the block in the row
    counts: torch.Tensor  # [B, H] int32

    @classmethod
    def zeros(cls, batch: int, heads: int, group: int, max_blocks: int, device: torch.device | str) -> KeptTokens:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        lists = (batch, heads, max_blocks)
        weights = torch.zeros(batch, heads, group, max_blocks, BLOCK_TOKENS, device=device)
        return cls(weights, numbers(*lists), numbers(*lists), numbers(batch, heads))

    def of_batch(self, count: int) -> KeptTokens:
        return KeptTokens(self.weights[:count], self.pages[:count], self.positions[:count], self.counts[:count])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch size, KV heads, query heads per KV head, and maximum number of blocks of a row."""
        batch, heads, group, max_blocks, _ = self.weights.shape
        return batch, heads, group, max_blocks


class SumWorkspace:
    """Device memory in which CTAs that share a list exchange partial sums."""

    def __init__(self, batch: int, heads: int, group: int, dim: int, device: torch.device | str) -> None:
        self.shape = (batch, heads, group, dim)
        self.splits = min(_MOST_SPLITS, max(1, _CTAS // max(1, batch * heads)))
        self.out = torch.zeros(batch, heads, self.splits, group, dim, device=device)
        self.arrived = torch.zeros(batch, heads, dtype=torch.int32, device=device)


def token_logits(query: torch.Tensor, codes: QuantisedCodes, step: Step, scale: float, kept: KeptTokens) -> None:
    """Write logits of all tokens of each row, in units of log2, to ``kept.weights``. query ``[B, H * G, D]``.

    Logits are computed from codes of up to 24,576 centroids. Tokens whose page is not in the pool get -inf. Entries
    beyond a row's last token are not written.
    """
    batch, heads, group, max_blocks = kept.shape
    if step.batch != batch or step.max_blocks != max_blocks or codes.heads != heads:
        raise ValueError(f"a step of {step.batch} rows of {step.max_blocks} blocks does not fit weights {kept.shape}")
    launch(
        "token_logits",
        codes=codes.arguments(),
        step=step.arguments(),
        query=address("query", query, codes.dtype, (batch, heads * group, codes.dim)),
        weights=address("weights", kept.weights, torch.float32, (batch, heads, group, max_blocks, BLOCK_TOKENS)),
        scale=scale,
        group=group,
    )


def keep_tokens(
    step: Step,
    kept: KeptTokens,
    least: float,
    *,
    renormalises: bool,
    pool_pages: int,
    counted: torch.Tensor | None = None,
) -> None:
    """Replace logits by weights of the fewest tokens that have share ``least`` of a query head's attention.

    Also list the blocks that have such tokens. The result equals softmax followed by
    ``reference_weights.cumulative_share``, up to rounding at the edge of ``least``. NaN and infinite logits get weight
    0. With ``renormalises``, the weights of kept tokens add up to 1. For each query head, the kept share of the row's
    tokens is added to ``counted`` (one int64), in units of 1 / ``SHARE_UNITS``.
    """
    batch, heads, group, max_blocks = kept.shape
    if step.batch != batch or step.max_blocks != max_blocks:
        raise ValueError(f"a step of {step.batch} rows of {step.max_blocks} blocks does not fit weights {kept.shape}")
    lists = (batch, heads, max_blocks)
    launch(
        "keep_tokens",
        step=step.arguments(),
        weights=address("weights", kept.weights, torch.float32, (batch, heads, group, max_blocks, BLOCK_TOKENS)),
        pages=address("pages", kept.pages, torch.int32, lists),
        positions=address("positions", kept.positions, torch.int32, lists),
        counts=address("counts", kept.counts, torch.int32, lists[:2]),
        counted=scalar_address("counted", counted, torch.int64),
        least=least,
        renormalises=renormalises,
        kv_heads=heads,
        group=group,
        pool_pages=pool_pages,
    )


def finish_sums(
    pool: HostPool,
    kept: KeptTokens,
    out: torch.Tensor,
    *,
    workspace: SumWorkspace,
    served: torch.Tensor | None = None,
    replies: torch.Tensor | None = None,
    active_rows: torch.Tensor | None = None,
) -> None:
    """Write ``reference_weights.sum_values`` of the lists to ``out`` ``[B, H * G, D]``, in the pool's dtype.

    Batch entries with ``served`` ``[B]`` int32 not 0 get the worker's ``replies`` ``[B, H * G, D]`` float32. For all
    other entries values are read from the pool. Pages that are not in the pool are skipped.
    """
    batch, heads, group, max_blocks = kept.shape
    pages, _, _, dim = pool.values.shape
    if workspace.shape != (batch, heads, group, dim):
        raise ValueError(f"the workspace is for {workspace.shape}, the lists need {(batch, heads, group, dim)}")
    if tuple(pool.values.shape) != (pages, heads, BLOCK_TOKENS, dim) or pool.values.dtype not in HALVES:
        raise ValueError(f"the pool's values are {tuple(pool.values.shape)} of {pool.values.dtype}")
    if (served is None) != (replies is None):
        raise ValueError("entries that are served need replies, and replies entries")
    lists, of_query = (batch, heads, max_blocks), (batch, heads * group, dim)
    launch(
        "finish_sums",
        values=pool.region.address_of("values of the pool", pool.values),
        weights=address("weights", kept.weights, torch.float32, (batch, heads, group, max_blocks, BLOCK_TOKENS)),
        pages=address("pages", kept.pages, torch.int32, lists),
        positions=address("positions", kept.positions, torch.int32, lists),
        counts=address("counts", kept.counts, torch.int32, lists[:2]),
        served=address("served", served, torch.int32, (batch,)),
        replies=address("replies", replies, torch.float32, of_query),
        out=address("out", out, pool.values.dtype, of_query),
        partial_out=workspace.out.data_ptr(),
        arrived=workspace.arrived.data_ptr(),
        active_rows=active_address(active_rows),
        batch=batch,
        kv_heads=heads,
        group=group,
        head_dim=dim,
        dtype=dtype_code(pool.values.dtype),
        max_blocks=max_blocks,
        pool_pages=pages,
        splits=workspace.splits,
    )
