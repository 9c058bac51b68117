"""A model with random keys and values in a host pool, to run prefill on rows with cached prefixes and check results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.blocks import compact_bytes
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.prefill import DevicePrefill, PrefillRows
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests
from sglang_hybrid.protocol.region import SharedRegion

UNTOUCHED = 77.0


@dataclass(frozen=True)
class Shape:
    heads: int = 2
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    layers: int = 3
    pages: int = 40
    channels: int = 32
    compact: bool = False  # whether digests are compact
    pool: torch.dtype | None = None  # dtype of the pool; None: `dtype`

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.pool or self.dtype

    @property
    def scale(self) -> float:
        return float(0.9 * self.dim**-0.5)  # not FlashInfer's default


@dataclass(frozen=True)
class Row:
    pages: list[int]
    length: int
    new: int

    @property
    def touched(self) -> list[int]:
        """Positions of the row's blocks that get new tokens."""
        return list(range((self.length - self.new) // BLOCK_TOKENS, -(-self.length // BLOCK_TOKENS)))


@dataclass(frozen=True)
class Result:
    rows: list[Row]
    queries: list[torch.Tensor]  # one for each layer, likewise below
    outs: list[torch.Tensor]
    inputs: list[torch.Tensor]  # referenced so that their memory is not reused before results are compared


class Model:
    """A model whose keys and values are fixed beforehand for every page; a row's tokens are those of its pages.

    Tokens that are not in the pool yet are NaN there, so results show whether a kernel attended to or digested them.
    """

    def __init__(self, shape: Shape, staging_pages: int, seed: int = 0) -> None:
        self.shape = shape
        of_pool = (shape.pages, shape.heads, BLOCK_TOKENS, shape.dim)
        size = torch.Size(of_pool).numel() * shape.pool_dtype.itemsize
        memory = SharedRegion(SharedRegion.size_for(*[size] * 2 * shape.layers))
        region = host_memory.RegisteredRegion(memory)
        self.truth: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.layers: list[DeviceLayer] = []
        random = seeded(seed)
        for _ in range(shape.layers):
            # all FP8 numbers are exact in 16 bits, so values rounded to FP8 first are stored without rounding
            keys, values = torch.randn(2, *of_pool, generator=random).to(shape.pool_dtype).to(shape.dtype)
            self.truth.append((keys, values))
            pool = HostPool(region, *(memory.take(of_pool, shape.pool_dtype).fill_(torch.nan) for _ in range(2)))
            digests = torch.full((*of_pool[:2], 2, shape.dim), UNTOUCHED, dtype=shape.dtype, device=DEVICE)
            codes = channels = None
            if shape.channels:
                codes = torch.full((*of_pool[:3], shape.channels // 2), 0xEE, dtype=torch.uint8, device=DEVICE)
                order = torch.rand(shape.heads, shape.dim, generator=random).argsort(dim=1)
                channels = order[:, : shape.channels].contiguous().to(DEVICE)
            compact_of = None
            if shape.compact:
                size = compact_bytes(shape.dim, shape.channels)
                digests = torch.full((*of_pool[:2], size), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
                compact_of = (shape.dtype, shape.dim)
            self.layers.append(DeviceLayer(pool, LayerDigests(digests, codes, channels, compact_of, shape.pool)))
        self.prefill = DevicePrefill(self.layers, staging_pages, shape.heads * shape.group, shape.dtype, DEVICE)

    def have_prefixes(self, rows: list[Row]) -> None:
        """Write the rows' prefixes to the pool, as an earlier pass would leave them."""
        for row in rows:
            position = torch.arange(row.length - row.new)
            pages = torch.tensor(row.pages, dtype=torch.int64)[position // BLOCK_TOKENS]
            for layer, truth in zip(self.layers, self.truth, strict=True):
                for part, kept in zip((layer.pool.keys, layer.pool.values), truth, strict=True):
                    part[pages, :, position % BLOCK_TOKENS] = kept[pages, :, position % BLOCK_TOKENS].to(part.dtype)

    def run(self, rows: list[Row], *, padding: int = 0, seed: int = 1, fused: bool = True) -> Result:
        """Run prefill of ``rows`` through all layers. The device may still be working when this returns.

        ``padding``: tokens added to the batch. ``fused``: keys and values are slices of one projection.
        """
        shape = self.shape
        longest = max(len(row.pages) for row in rows)
        table = [row.pages + [-1] * (longest - len(row.pages)) for row in rows]
        batch = PrefillRows(torch.tensor(table), [row.length for row in rows], [row.new for row in rows])
        tokens = sum(row.new for row in rows) + padding
        random, queries, outs, inputs = seeded(seed), [], [], []
        for layer in range(shape.layers):
            query = torch.randn(tokens, shape.heads * shape.group, shape.dim, generator=random) * 2
            keys, values = (torch.cat([self.new_tokens(row, part) for row in rows]) for part in self.truth[layer])
            together = torch.full((tokens, 2 * shape.heads, shape.dim), torch.nan, dtype=shape.dtype)
            together[: tokens - padding] = torch.cat((keys, values), dim=1)
            if not fused:  # strides that kernels do not support
                together = together.transpose(0, 1).contiguous().transpose(0, 1)
            queries.append(query.to(DEVICE, shape.dtype))
            inputs.append(together.to(DEVICE))
        self.prefill.begin(batch, shape.scale)
        for layer in range(shape.layers):
            keys, values = inputs[layer].split(shape.heads, dim=1)
            outs.append(self.prefill.attend(layer, queries[layer], keys, values))
        self.prefill.finish()
        return Result(rows, queries, outs, inputs)

    def new_tokens(self, row: Row, part: torch.Tensor) -> torch.Tensor:
        return self.tokens(row, part)[row.length - row.new :]

    @staticmethod
    def tokens(row: Row, part: torch.Tensor) -> torch.Tensor:
        return part[row.pages].transpose(1, 2).flatten(0, 1)[: row.length]

    def check(self, result: Result) -> None:
        """Assert correct outputs, all tokens in the pool, and digests and codes of pages with new tokens."""
        torch.cuda.synchronize()
        assert self.prefill.refused() == 0
        for layer in range(self.shape.layers):
            self._check_outputs(layer, result)
            self._check_pool(layer, result)

    def check_outputs(self, result: Result) -> None:
        torch.cuda.synchronize()
        for layer in range(self.shape.layers):
            self._check_outputs(layer, result)

    def _check_outputs(self, layer: int, result: Result) -> None:
        most = 2e-2 if self.shape.dtype == torch.bfloat16 else 4e-3
        first = 0
        for row in result.rows:
            part = slice(first, first + row.new)
            first += row.new
            keys, values = (self.tokens(row, part).transpose(0, 1).to(DEVICE).float() for part in self.truth[layer])
            query = result.queries[layer][part].float()
            expected = reference.attend_prefill(query, keys, values, self.shape.scale)
            torch.testing.assert_close(result.outs[layer][part].float(), expected, atol=most, rtol=most)
        assert not result.outs[layer][first:].any()  # padding

    def _check_pool(self, layer: int, result: Result) -> None:
        pool, digests = self.layers[layer].pool, self.layers[layer].digests
        for row in result.rows:
            for part, truth in zip((pool.keys, pool.values), self.truth[layer], strict=True):
                assert torch.equal(self.tokens(row, part).to(truth.dtype), self.tokens(row, truth))
            if not row.new:
                continue
            pages = torch.tensor(row.pages)[row.touched]
            filled = torch.tensor([min(BLOCK_TOKENS, row.length - BLOCK_TOKENS * block) for block in row.touched])
            keys = self.truth[layer][0][pages]
            expected = reference.minmax_digest(keys, filled)
            if self.shape.compact and digests.channels is not None:
                expected = reference.compact_digest(expected, digests.channels.cpu())
            assert torch.equal(digests.digests[pages.to(DEVICE)].cpu(), expected)
            if digests.codes is not None and digests.channels is not None:
                absent = (torch.arange(BLOCK_TOKENS) >= filled[:, None])[:, None, :, None]
                codes = reference.sketch_codes(keys, expected, digests.channels.cpu())
                found = digests.codes[pages.to(DEVICE)].cpu()
                assert torch.equal(found.masked_fill(absent, 0), codes.masked_fill(absent, 0))

    def untouched(self) -> list[torch.Tensor]:
        """Return for every layer the pages that were not written. Digests and keys must agree about which these are."""
        torch.cuda.synchronize()
        found = []
        for layer in self.layers:
            no_digest = (layer.digests.digests == UNTOUCHED).flatten(1).all(dim=1).cpu()
            keys, values = (part.float().isnan().flatten(1).all(dim=1) for part in (layer.pool.keys, layer.pool.values))
            no_keys = keys & values
            assert torch.equal(no_digest, no_keys)
            found.append(no_keys.nonzero().flatten())
        return found
