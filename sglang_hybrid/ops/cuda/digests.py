"""Store keys and values of new tokens in slots and in the host pool, and update digests and sketches.

Tensors that the kernels of a layer share::

    digests  [pages, H, 2, D]        maximum, minimum; or compact [pages, H, bytes], see reference.compact_digest
    codes    [pages, H, 32, C / 2]   of channels [H, C], see reference.sketch_codes
    slots    [rows, H, S, 32, D]     and positions [rows, H, S]: block of the row's sequence, -1 for none

Slot s < sink holds block s and no other. All other slots hold recent blocks, the tail and resident blocks in any
order: the position of a block tells which of these it is. S = sink + recent + 1 + resident blocks. A new tail takes an
empty slot, or the slot of the resident block with the lowest score. A block that leaves the recent window keeps its
slot and is resident from then on.

The caller must set a row's positions to -1 before the row's first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS, compact_bytes
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.new_keys import keys_of_pages
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, code_addresses
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code


@dataclass(frozen=True)
class LayerDigests:
    """Digests and, where the policy has them, sketches of all pages of one layer."""

    digests: torch.Tensor  # of the model's dtype, or compact; [pages, H, 0, D] under policies that need none
    codes: torch.Tensor | None = None
    channels: torch.Tensor | None = None  # int64
    compact_of: tuple[torch.dtype, int] | None = None  # the model's dtype and head_dim, if digests are compact
    pool: torch.dtype | None = None  # dtype of keys in the pool; None: the model's dtype

    @property
    def heads(self) -> int:
        return self.digests.shape[1]

    @classmethod
    def none(
        cls, keys: torch.Tensor, device: torch.device | str, model_dtype: torch.dtype | None = None
    ) -> LayerDigests:
        """Return empty digests for a policy that needs none, over a pool of ``keys`` ``[pages, H, 32, D]``."""
        pages, heads, _, dim = keys.shape
        return cls(torch.empty(pages, heads, 0, dim, dtype=model_dtype or keys.dtype, device=device), pool=keys.dtype)

    @property
    def is_none(self) -> bool:
        return self.digests.numel() == 0

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: the dtype of queries, and of new keys before they are stored."""
        return self.compact_of[0] if self.compact_of else self.digests.dtype

    @property
    def pool_dtype(self) -> torch.dtype:
        """The dtype in which the pool stores keys."""
        return self.pool or self.dtype

    @property
    def dim(self) -> int:
        return self.compact_of[1] if self.compact_of else self.digests.shape[3]

    def arguments(self) -> KernelStruct:
        pages, heads, dim = self.digests.shape[0], self.heads, self.dim
        codes, channels, count = self.codes, self.channels, 0
        if (codes is None) != (channels is None):
            raise ValueError("codes need their channels, and channels codes")
        if codes is not None:
            count = 2 * codes.shape[3]
            if codes.data_ptr() % 16:
                raise ValueError("codes must be aligned to 16 bytes")
        if self.is_none:
            digests = None
        elif self.compact_of is None:
            digests = address("digests", self.digests, HALVES, (pages, heads, 2, dim))
        elif count == 0 or count % 8 or dim % 32 or self.digests.data_ptr() % 16:
            raise ValueError("compact digests need sketches, whole words of channels, and alignment to 16 bytes")
        else:
            digests = address("digests", self.digests, torch.uint8, (pages, heads, compact_bytes(dim, count)))
        return struct(
            "digests",
            digests=digests,
            codes=address("codes", codes, torch.uint8, (pages, heads, BLOCK_TOKENS, count // 2)),
            channels=address("channels", channels, torch.int64, (heads, count)),
            pages=pages,
            kv_heads=heads,
            head_dim=dim,
            channel_count=count,
            dtype=dtype_code(self.pool_dtype, self.dtype),
            compact=self.compact_of is not None,
        )


@dataclass(frozen=True)
class SlotTable:
    """Table of the block that each slot of a layer holds, and numbers of a row's blocks that are always attended."""

    positions: torch.Tensor  # [rows, H, S] int32
    sink: int
    recent: int

    def arguments(self, heads: int) -> KernelStruct:
        rows, _, slots = self.positions.shape
        if slots < self.sink + self.recent + 1:
            raise ValueError(f"{slots} slots do not hold {self.sink} sink and {self.recent} recent blocks and the tail")
        return struct(
            "slot_table",
            positions=address("positions", self.positions, torch.int32, (rows, heads, slots)),
            rows=rows,
            slots=slots,
            sink=self.sink,
            recent=self.recent,
        )


@dataclass(frozen=True)
class DenseTable:
    """Table of the device pages that hold the blocks of rows that are in device memory as a whole."""

    pages: torch.Tensor  # [rows, max_blocks] int32: page of each block
    held: torch.Tensor  # [rows] int32: number of the row's blocks that have a page
    device_pages: int  # number of pages in device memory

    def arguments(self) -> KernelStruct:
        rows, max_blocks = self.pages.shape
        return struct(
            "dense_table",
            pages=address("pages of the dense table", self.pages, torch.int32, (rows, max_blocks)),
            held=address("held", self.held, torch.int32, (rows,)),
            rows=rows,
            max_blocks=max_blocks,
            device_pages=self.device_pages,
        )


@dataclass(frozen=True)
class HostPool:
    """One layer of the host pool, keys and values ``[pages, H, 32, D]`` in registered memory."""

    region: RegisteredRegion
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class LastQueries:
    """Last query of each row in one layer, kept while whole rows are in device memory.

    When whole rows are given up, these queries select the blocks that get slots.
    """

    queries: torch.Tensor  # [rows, H * G, D]
    lengths: torch.Tensor  # [rows] int32: tokens of the row up to and including the token of the query


def append(
    digests: LayerDigests,
    table: SlotTable,
    step: Step,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    pool: HostPool,
    *,
    scores: torch.Tensor | None = None,
    by_row: bool = False,
    dense: DenseTable | None = None,
    query: torch.Tensor | None = None,
    kept: LastQueries | None = None,
    overlaps: bool = False,
    refused: torch.Tensor | None = None,
    codes: SlotCodes | None = None,
) -> None:
    """Store the step's new tokens, keys and values ``[B, H, D]``, in the tails' slots and in the host pool.

    The stride between batch entries is free. An FP8 pool stores ``reference.to_stored`` of keys and values. If they are
    None, there are no new tokens yet: digests and codes of the tails are computed from the tokens in the pool.

    Digests and codes of the tails are computed again from the slots. A tail that was open at selection has a slot
    already. A tail without a slot gets one here, by ``scores`` of the last selection (``[B, H, max_blocks]``, or with
    ``by_row`` ``[rows, H, max_blocks]``), and its earlier tokens are copied from the pool.

    With ``dense``, slots are pages ``[pages, H, 32, D]``, and ``dense`` gives the page of each tail. Such tails are
    digested when they are full, because nothing reads their digests before. The step's ``query`` ``[B, H * G, D]`` is
    copied to ``kept``. With ``overlaps``, the kernel may begin before earlier launches on the stream have finished:
    of the tensors that are read here, these launches may write only query, keys and values. Rows whose page is not in
    the pool are skipped, and their number is added to ``refused`` (one int64). With ``codes``, not with
    ``dense``, slots get codes, as for ``attend_slots``; then digests are of what the codes stand for.
    """
    dtype, stored, heads, dim = digests.dtype, digests.pool_dtype, digests.heads, digests.dim
    of_slots = (*table.positions.shape, BLOCK_TOKENS, dim)
    owners = table.positions.shape[0] if by_row else step.batch
    if dense is not None:
        of_slots = (dense.device_pages, heads, BLOCK_TOKENS, dim)
        if dense.pages.shape[1] != step.max_blocks:
            raise ValueError(f"the dense table is for {dense.pages.shape[1]} blocks, the step for {step.max_blocks}")
    of_pool = (digests.digests.shape[0], heads, BLOCK_TOKENS, dim)
    for name, part in (("keys", pool.keys), ("values", pool.values)):
        if tuple(part.shape) != of_pool or part.dtype != stored:
            raise ValueError(f"the pool's {name} are {tuple(part.shape)} of {part.dtype}, not {of_pool} of {stored}")
    in_slots = stored if codes is None else torch.uint8
    if (query is None) != (kept is None):
        raise ValueError("a query needs a place to be kept, and a place a query")
    group = 0 if query is None else query.shape[1] // heads
    rows = table.positions.shape[0]
    key_entries = None if keys is None else _entries("keys", keys, dtype, (step.batch, heads, dim))
    launch(
        "append",
        digests=digests.arguments(),
        table=table.arguments(heads),
        dense=struct("dense_table") if dense is None else dense.arguments(),
        step=step.arguments(),
        keys=key_entries,
        values=None if values is None else _entries("values", values, dtype, (step.batch, heads, dim)),
        key_stride=0 if keys is None else keys.stride(0),
        value_stride=0 if values is None else values.stride(0),
        key_slots=address("key_slots", key_slots, in_slots, of_slots),
        value_slots=address("value_slots", value_slots, in_slots, of_slots),
        **code_addresses(codes, key_slots),
        pool_keys=pool.region.address_of("keys of the pool", pool.keys),
        pool_values=pool.region.address_of("values of the pool", pool.values),
        scores=address("scores", scores, torch.float32, (owners, heads, step.max_blocks)),
        query=address("query", query, dtype, (step.batch, heads * group, dim)),
        kept_queries=None if kept is None else address("kept", kept.queries, dtype, (rows, heads * group, dim)),
        kept_lengths=None if kept is None else address("their lengths", kept.lengths, torch.int32, (rows,)),
        group=group,
        scores_by_row=by_row,
        overlaps=overlaps and dense is not None,
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
    )


def _entries(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int, int]) -> int:
    """Return the address of a tensor whose batch entries have any stride, as slices of one projection have."""
    apart = tensor.stride(0)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_cuda:
        raise ValueError(
            f"{name} are {tuple(tensor.shape)} of {tensor.dtype}, must be {shape} of {dtype} on the device"
        )
    if tensor.stride()[1:] != (shape[2], 1) or apart % 8 or tensor.data_ptr() % 16:
        raise ValueError(f"{name} must be contiguous in each entry and aligned, their strides are {tensor.stride()}")
    return tensor.data_ptr()


def digest_pages(digests: LayerDigests, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
    """Write digests and codes of ``pages``, each with at least one token. ``keys_of_pages`` explains the arguments."""
    if digests.is_none:
        return
    if keys.data_ptr() % 16 or any(stride % 8 for stride in keys.stride()[:3]):
        raise ValueError(f"channels of keys must be aligned to 16 bytes, strides are {keys.stride()}")
    launch(
        "digest_pages",
        digests=digests.arguments(),
        source=keys_of_pages(keys, pages, filled, digests.heads, digests.dim, digests.pool_dtype),
    )
