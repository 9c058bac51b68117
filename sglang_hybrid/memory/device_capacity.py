"""GPU memory that a server takes for rows and pages, and how many pages that leaves.

Pure arithmetic: this module imports neither torch nor SGLang. A server calls it when its pool is made, and
``sglang-hybrid size`` calls it on hosts that have neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.blocks import BLOCK_TOKENS, compact_bytes
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.settings import hgca_slots_of, paper_slots_of, slots_of, unsupported_settings
from sglang_hybrid.memory.capacity import GIB, CapacityError, KVShape
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.registry import policy_named

WORKSPACE_BYTES = 128 << 20  # of FlashInfer's split attention; its kernels for Hopper do not use it
_POSITION_BYTES = _PAGE_BYTES = _MASK_BYTES = 4  # int32
_SCORE_BYTES = _AVERAGE_BYTES = _WEIGHT_BYTES = 4  # float32
_LANES = 2  # buffers of what is fetched one layer ahead: for even and for odd layers


@dataclass(frozen=True)
class RowBytes:
    """Device memory of one row."""

    slots: int  # resident blocks and their positions, and the queries that select the first ones
    scores: int = 0  # of all blocks of the longest context, or weights of its tokens


@dataclass(frozen=True)
class DeviceBytes:
    """Device memory that an engine takes beside digests and sketches."""

    slots: int = 0  # of all rows
    scores: int = 0  # of all rows
    staging: int = 0  # for one context during prefill

    @property
    def resident(self) -> int:
        return self.slots + self.scores


@dataclass(frozen=True)
class PageBytes:
    """Device memory of one page of the host pool."""

    digests: int
    sketches: int
    codes: int = 0  # of single keys, under policies that keep them

    @property
    def total(self) -> int:
        return self.digests + self.sketches + self.codes


@dataclass(frozen=True)
class DevicePlan:
    """What becomes of the device memory that SGLang leaves for the KV cache."""

    rows: int
    taken: DeviceBytes
    page: PageBytes
    pages: int  # whose digests and sketches fit in the rest


def rows_of(requests: int, arriving: int = 0) -> int:
    """Rows for so many running requests: one more takes the writes of padding. ``arriving``: KV cache on its way."""
    return requests + 1 + arriving


# -- pages -------------------------------------------------------------------------------------------------------------


def is_compact(digest_dtype: str, channels: int, head_dim: int, device: str) -> bool:
    """Whether digests are ``CompactDigests``.

    ``auto``: on a GPU, where reading digests is most of what scoring takes, if these shapes have a compact form.
    """
    if digest_dtype == "auto":
        fits = channels > 0 and channels % 8 == 0 and head_dim % 32 == 0
        return fits and device.partition(":")[0] != "cpu"
    return digest_dtype == "int8" and channels > 0


def page_bytes(config: HybridConfig, shape: KVShape, device: str) -> PageBytes:
    """Digests, sketches and codes of one page, of all layers. Raises PolicyError."""
    blocks = shape.layers * shape.kv_heads
    codes = blocks * BLOCK_TOKENS * code_bytes(config, shape)
    if not policy_named(config.policy).needs.digests:
        return PageBytes(0, 0, codes)
    channels = min(config.sketch_channels, shape.key_dim)
    if is_compact(config.digest_dtype, channels, shape.key_dim, device):
        digest = compact_bytes(shape.key_dim, channels)
    else:
        # maximum and minimum; of FP8 a GPU has them in the model's dtype
        digest = 2 * shape.key_dim * (shape.itemsize if device.partition(":")[0] == "cpu" else max(shape.itemsize, 2))
    return PageBytes(blocks * digest, blocks * BLOCK_TOKENS * channels // 2, codes)


def code_bytes(config: HybridConfig, shape: KVShape) -> int:
    """Bytes that the policy keeps of every key of a KV head, beside digests and sketches."""
    of_key = policy_named(config.policy).code_bytes
    return of_key(config, shape) if of_key else 0


# -- rows --------------------------------------------------------------------------------------------------------------


def scout_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """A row of at most ``max_blocks`` blocks under policies that select."""
    slots, lists = slots_of(config), shape.layers * shape.kv_heads
    positions = lists * slots * _POSITION_BYTES
    taken = _block_bytes(shape, slots) + positions + _last_query_bytes(config, shape)
    return RowBytes(taken, lists * max_blocks * _SCORE_BYTES)


def scoutattention_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """The same under policy scoutattention, which notes beside each slot whether its block is attended."""
    slots, lists = paper_slots_of(config), shape.layers * shape.kv_heads
    positions = 2 * lists * slots * _POSITION_BYTES
    taken = _block_bytes(shape, slots) + positions + _last_query_bytes(config, shape)
    return RowBytes(taken, lists * max_blocks * _SCORE_BYTES)


def full_row_bytes(config: HybridConfig, shape: KVShape, _max_blocks: int) -> RowBytes:
    """A row's share of the memory that holds whole rows under policy full."""
    return RowBytes(_block_bytes(shape, whole_request_blocks(config)))


def hgca_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """A row of at most ``max_blocks`` blocks under policy hgca: its window, averages of the window's tokens, masks."""
    slots, lists = hgca_slots_of(config), shape.layers * shape.kv_heads
    of_slot = _POSITION_BYTES + BLOCK_TOKENS * _AVERAGE_BYTES
    return RowBytes(_block_bytes(shape, slots) + lists * slots * of_slot, lists * max_blocks * _MASK_BYTES)


def infinigen_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """A row under policy infinigen: its share for whole rows, staged tokens of two layers, ranks and lists."""
    budget = min(config.budget_tokens // BLOCK_TOKENS, max_blocks)
    by_block = config.section(InfinigenOptions).unit == "blocks"
    staged = _LANES * _block_bytes(shape, budget) // shape.layers
    ranks = max_blocks * (1 if by_block else BLOCK_TOKENS) * _SCORE_BYTES
    listed = budget if by_block else min(max_blocks, config.budget_tokens)
    lists = _LANES * listed * (_POSITION_BYTES + 2 * _MASK_BYTES) + max_blocks * _MASK_BYTES
    whole = _block_bytes(shape, whole_request_blocks(config))
    return RowBytes(whole + staged, shape.kv_heads * (ranks + lists))


def hcattention_row_bytes(_config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    """A row of at most ``max_blocks`` blocks under policy hcattention: weights of its tokens in a layer, and lists."""
    weights = shape.kv_heads * shape.group * max_blocks * BLOCK_TOKENS * _WEIGHT_BYTES
    return RowBytes(0, weights + shape.kv_heads * max_blocks * (_PAGE_BYTES + _POSITION_BYTES))


def whole_request_blocks(config: HybridConfig) -> int:
    """Blocks of a row under policies that keep none resident: as much device memory as a budget takes under others."""
    return config.budget_tokens // BLOCK_TOKENS if config.whole_requests == "auto" else 0


def _last_query_bytes(config: HybridConfig, shape: KVShape) -> int:
    """Of all layers, while a row is held as a whole."""
    query = shape.kv_heads * shape.group * shape.key_dim * max(shape.itemsize, 2)  # the model's dtype, not FP8
    return shape.layers * query if config.whole_requests == "auto" else 0


def _block_bytes(shape: KVShape, blocks: int) -> int:
    return shape.layers * shape.kv_heads * blocks * 2 * BLOCK_TOKENS * shape.key_dim * shape.itemsize


def staging_bytes(pages: int, shape: KVShape) -> int:
    """Two stagings of one layer's keys and values, and FlashInfer's workspace."""
    return 4 * pages * shape.kv_heads * BLOCK_TOKENS * shape.key_dim * shape.itemsize + WORKSPACE_BYTES


def device_bytes(config: HybridConfig, shape: KVShape, rows: int, context: int) -> DeviceBytes:
    """What the CUDA engine takes for ``rows`` requests of at most ``context`` tokens."""
    longest = -(-context // BLOCK_TOKENS)
    of_row = policy_named(config.policy).cuda_row_bytes
    assert of_row is not None  # unsupported_settings asks before
    row = of_row(config, shape, longest)
    return DeviceBytes(rows * row.slots, rows * row.scores, staging_bytes(longest, shape))


# -- what is left ------------------------------------------------------------------------------------------------------


def plan_device(
    available: int, config: HybridConfig, shape: KVShape, rows: int, context: int, *, device: str, cuda_graphs: bool
) -> DevicePlan:
    """Pages whose digests and sketches ``available`` bytes hold, beside the resident blocks of ``rows`` rows.

    Raises CapacityError if they are less than one budget.
    """
    taken = DeviceBytes()
    if unsupported_settings(config) is None and cuda_graphs:
        taken = device_bytes(config, shape, rows, context)
    page = page_bytes(config, shape, device)
    pages = (available - taken.resident - taken.staging) // max(page.total, 1)  # a policy may keep nothing
    if pages * BLOCK_TOKENS < config.budget_tokens:
        raise CapacityError(
            f"{available / GIB:.2f} GiB of device memory are left for the KV cache, of which the resident blocks of "
            f"{rows} rows take {taken.resident / GIB:.2f} GiB, one context during prefill {taken.staging / GIB:.2f} "
            f"GiB and the digests {page.total} bytes per page: too little for one "
            f"budget of {config.budget_tokens} tokens; lower --max-running-requests or raise --mem-fraction-static"
        )
    return DevicePlan(rows, taken, page, pages)
