"""GPU memory that a server takes for rows and pages, and the number of pages whose digests and sketches then fit.

This module only computes, and imports neither torch nor SGLang. A server calls it when it creates its pool, and
``sglang-hybrid size`` calls it on hosts that have neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.blocks import BLOCK_TOKENS, compact_bytes
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.settings import hgca_slots_of, paper_slots_of, slots_of, unsupported_settings
from sglang_hybrid.memory.capacity import GIB, CapacityError, KVShape
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.registry import keeps_codes_in_slots, policy_named

WORKSPACE_BYTES = 128 << 20  # for FlashInfer's split attention; FlashInfer's kernels for Hopper do not use it
_POSITION_BYTES = _PAGE_BYTES = _MASK_BYTES = 4  # int32
_FACTOR_BYTES = 2  # float16
_SCORE_BYTES = _AVERAGE_BYTES = _WEIGHT_BYTES = 4  # float32
_LANES = 2  # sets of buffers for blocks that are fetched one layer ahead: for even and for odd layers


@dataclass(frozen=True)
class RowBytes:
    """Bytes of device memory that one row takes, in all layers."""

    slots: int  # blocks and what is kept beside them; last queries, which select blocks after steps with whole rows
    scores: int = 0  # data per block or token of the longest context: scores, masks, ranks or weights


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of device memory that an engine takes, without digests and sketches."""

    slots: int = 0  # ``RowBytes.slots`` of all rows
    scores: int = 0  # ``RowBytes.scores`` of all rows
    staging: int = 0  # staged pages of one context during prefill, and FlashInfer's workspace

    @property
    def resident(self) -> int:
        return self.slots + self.scores


@dataclass(frozen=True)
class PageBytes:
    """Bytes of device memory that one page of the host pool takes, in all layers."""

    digests: int
    sketches: int
    codes: int = 0  # codes of single keys, under policies that keep them

    @property
    def total(self) -> int:
        return self.digests + self.sketches + self.codes


@dataclass(frozen=True)
class DevicePlan:
    """How the device memory that SGLang leaves for the KV cache is divided."""

    rows: int
    taken: DeviceBytes  # by the engine
    page: PageBytes
    pages: int  # number of pages whose digests, sketches and codes fit in the rest


def rows_of(requests: int, arriving: int = 0) -> int:
    """Return the number of rows for ``requests`` running requests: one more row takes the writes of padding.

    ``arriving``: requests whose KV cache is being transferred from a prefill instance.
    """
    return requests + 1 + arriving


# -- pages -------------------------------------------------------------------------------------------------------------


def is_compact(digest_dtype: str, channels: int, head_dim: int, device: str) -> bool:
    """Return True if digests are ``CompactDigests``.

    ``auto`` chooses compact digests on a GPU, where scoring mostly reads digests, if a compact form of these shapes
    exists.
    """
    if digest_dtype == "auto":
        fits = channels > 0 and channels % 8 == 0 and head_dim % 32 == 0
        return fits and device.partition(":")[0] != "cpu"
    return digest_dtype == "int8" and channels > 0


def page_bytes(config: HybridConfig, shape: KVShape, device: str) -> PageBytes:
    """Return the bytes of digests, sketches and codes of one page, in all layers.

    Raise PolicyError if a file that the policy needs cannot be read or does not fit the model.
    """
    blocks = shape.layers * shape.kv_heads
    codes = blocks * BLOCK_TOKENS * code_bytes(config, shape)
    if not policy_named(config.policy).needs.digests:
        return PageBytes(0, 0, codes)
    channels = min(config.sketch_channels, shape.key_dim)
    if is_compact(config.digest_dtype, channels, shape.key_dim, device):
        digest = compact_bytes(shape.key_dim, channels)
    else:
        # maximum and minimum; digests of an FP8 cache are in the model's dtype on a GPU
        digest = 2 * shape.key_dim * (shape.itemsize if device.partition(":")[0] == "cpu" else max(shape.itemsize, 2))
    return PageBytes(blocks * digest, blocks * BLOCK_TOKENS * channels // 2, codes)


def code_bytes(config: HybridConfig, shape: KVShape) -> int:
    """Return the bytes that the policy keeps of every key of a KV head on the device, beside digests and sketches."""
    of_key = policy_named(config.policy).code_bytes
    return of_key(config, shape) if of_key else 0


# -- rows --------------------------------------------------------------------------------------------------------------


def scout_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """Return the memory of a row of at most ``max_blocks`` blocks under policy scout."""
    slots, lists = slots_of(config), shape.layers * shape.kv_heads
    positions = lists * slots * _POSITION_BYTES
    blocks = _block_bytes(shape, slots)
    if keeps_codes_in_slots(config):
        blocks //= shape.itemsize  # a code has one byte
        blocks += lists * slots * 2 * BLOCK_TOKENS * _FACTOR_BYTES  # of each token's keys and values
    return RowBytes(blocks + positions + _last_query_bytes(config, shape), lists * max_blocks * _SCORE_BYTES)


def scoutattention_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """Return the memory of a row of at most ``max_blocks`` blocks under policy scoutattention.

    Beside each slot's position, this policy keeps the attended block of the slot.
    """
    slots, lists = paper_slots_of(config), shape.layers * shape.kv_heads
    positions = 2 * lists * slots * _POSITION_BYTES
    taken = _block_bytes(shape, slots) + positions + _last_query_bytes(config, shape)
    return RowBytes(taken, lists * max_blocks * _SCORE_BYTES)


def full_row_bytes(config: HybridConfig, shape: KVShape, _max_blocks: int) -> RowBytes:
    """Return a row's share of the memory that holds whole rows under policy full."""
    return RowBytes(_block_bytes(shape, whole_request_blocks(config)))


def hgca_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """Return the memory of a row of at most ``max_blocks`` blocks under policy hgca: window, averages and masks."""
    slots, lists = hgca_slots_of(config), shape.layers * shape.kv_heads
    of_slot = _POSITION_BYTES + BLOCK_TOKENS * _AVERAGE_BYTES
    return RowBytes(_block_bytes(shape, slots) + lists * slots * of_slot, lists * max_blocks * _MASK_BYTES)


def infinigen_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """Return the memory of a row under policy infinigen: share for whole rows, staged tokens of two layers, lists."""
    budget = min(config.budget_tokens // BLOCK_TOKENS, max_blocks)
    by_block = config.section(InfinigenOptions).unit == "blocks"
    staged = _LANES * _block_bytes(shape, budget) // shape.layers
    ranks = max_blocks * (1 if by_block else BLOCK_TOKENS) * _SCORE_BYTES
    listed = budget if by_block else min(max_blocks, config.budget_tokens)
    lists = _LANES * listed * (_POSITION_BYTES + 2 * _MASK_BYTES) + max_blocks * _MASK_BYTES
    whole = _block_bytes(shape, whole_request_blocks(config))
    return RowBytes(whole + staged, shape.kv_heads * (ranks + lists))


def hcattention_row_bytes(_config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """Return the memory of a row under policy hcattention: weights of its tokens in one layer, and block lists."""
    weights = shape.kv_heads * shape.group * max_blocks * BLOCK_TOKENS * _WEIGHT_BYTES
    return RowBytes(0, weights + shape.kv_heads * max_blocks * (_PAGE_BYTES + _POSITION_BYTES))


def whole_request_blocks(config: HybridConfig) -> int:
    """Return the blocks per row that hold whole rows, under policies without resident blocks: a budget's, or 0."""
    return config.budget_tokens // BLOCK_TOKENS if config.whole_requests == "auto" else 0


def _last_query_bytes(config: HybridConfig, shape: KVShape) -> int:
    """Return the bytes of a row's last queries in all layers; 0 if whole rows are never held."""
    query = shape.kv_heads * shape.group * shape.key_dim * max(shape.itemsize, 2)  # the model's dtype, not FP8
    return shape.layers * query if config.whole_requests == "auto" else 0


def _block_bytes(shape: KVShape, blocks: int) -> int:
    return shape.layers * shape.kv_heads * blocks * 2 * BLOCK_TOKENS * shape.key_dim * shape.itemsize


def staging_bytes(pages: int, shape: KVShape) -> int:
    """Return the bytes of two stagings of ``pages`` pages of one layer, and of FlashInfer's workspace."""
    return 4 * pages * shape.kv_heads * BLOCK_TOKENS * shape.key_dim * shape.itemsize + WORKSPACE_BYTES


def device_bytes(config: HybridConfig, shape: KVShape, rows: int, context: int) -> DeviceBytes:
    """Return the device memory that the CUDA engine takes for ``rows`` rows of at most ``context`` tokens."""
    longest = -(-context // BLOCK_TOKENS)
    of_row = policy_named(config.policy).cuda_row_bytes
    assert of_row is not None  # unsupported_settings checks this first
    row = of_row(config, shape, longest)
    return DeviceBytes(rows * row.slots, rows * row.scores, staging_bytes(longest, shape))


# -- what is left ------------------------------------------------------------------------------------------------------


def plan_device(
    available: int, config: HybridConfig, shape: KVShape, rows: int, context: int, *, device: str, cuda_graphs: bool
) -> DevicePlan:
    """Divide ``available`` bytes among ``rows`` rows of at most ``context`` tokens, and data kept per page of the pool.

    Raise CapacityError if the pages hold less than one budget.
    """
    taken = DeviceBytes()
    if unsupported_settings(config) is None and cuda_graphs:
        taken = device_bytes(config, shape, rows, context)
    page = page_bytes(config, shape, device)
    pages = (available - taken.resident - taken.staging) // max(page.total, 1)  # a policy may keep nothing per page
    if pages * BLOCK_TOKENS < config.budget_tokens:
        raise CapacityError(
            f"{available / GIB:.2f} GiB of device memory are left for the KV cache, of which the resident blocks of "
            f"{rows} rows take {taken.resident / GIB:.2f} GiB, one context during prefill {taken.staging / GIB:.2f} "
            f"GiB and the digests {page.total} bytes per page: too little for one "
            f"budget of {config.budget_tokens} tokens; lower --max-running-requests or raise --mem-fraction-static"
        )
    return DevicePlan(rows, taken, page, pages)
