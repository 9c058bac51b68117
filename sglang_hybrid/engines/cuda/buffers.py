"""Buffers between the kernels of a layer: allocated once for the largest batch; smaller batches use the first part."""

from __future__ import annotations

import functools

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.engines.cuda.layers import DeviceShape
from sglang_hybrid.ops.cuda.attention import AttendWorkspace
from sglang_hybrid.ops.cuda.scoring import ScoreWorkspace
from sglang_hybrid.ops.cuda.selection import Misses, RecallPlan
from sglang_hybrid.ops.cuda.tensors import bit_words

MOST_GATHERED = 16  # maximum number of misses of a (row, KV head) that one step copies to the device


class LaneBuffers:
    """Query, misses and gather plan of one layer. Written one layer ahead, so even and odd layers have one set each."""

    def __init__(
        self, shape: DeviceShape, budget: int, gathers: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._query = torch.zeros(shape.max_batch, shape.heads * shape.group, shape.dim, dtype=dtype, device=device)
        self._misses = Misses(shape.max_batch, shape.heads, budget, device)
        words = bit_words(shape.max_blocks)
        self._held = torch.zeros(shape.max_batch, shape.heads, words, dtype=torch.int32, device=device)
        # misses that get slots before the layer is attended
        self.gathered = RecallPlan(shape.max_batch * shape.heads * MOST_GATHERED, device) if gathers else None

    def query(self, count: int) -> torch.Tensor:
        return self._query[:count]

    def held(self, count: int) -> torch.Tensor:
        """Return ``[count, KV heads, words]``: bits of blocks in slots, of rows in their ``WholeSteps``."""
        return self._held[:count]

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def misses(self, count: int) -> Misses:
        return self._misses.of_batch(count)


class AttentionBuffers:
    """Result of the layer that is being attended, and the workspace in which CTAs exchange partial results."""

    def __init__(
        self, shape: DeviceShape, dtype: torch.dtype, kept_dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate the result. ``dtype``: of the model. ``kept_dtype``: of keys and values in device memory."""
        self._shape, self._kept_dtype, self._device = shape, kept_dtype, device
        self._out = torch.zeros(shape.max_batch, shape.heads * shape.group, shape.dim, dtype=dtype, device=device)

    def out(self, count: int) -> torch.Tensor:
        return self._out[:count]

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def attending(self, count: int) -> AttendWorkspace:
        shape = self._shape
        return AttendWorkspace(count, shape.heads, shape.group, shape.dim, self._device, self._kept_dtype)


class PartialBuffers:
    """Both partial results of a layer whose attention the GPU shares with the CPU worker."""

    def __init__(self, shape: DeviceShape, device: torch.device | str) -> None:
        heads = shape.heads * shape.group
        of_query = (shape.max_batch, heads, shape.dim)
        self._local = torch.zeros(of_query, device=device), torch.zeros(of_query[:2], device=device)
        self._replies = torch.zeros(of_query, device=device), torch.zeros(of_query[:2], device=device)
        self._served = torch.zeros(shape.max_batch, dtype=torch.int32, device=device)
        self._full = torch.full((shape.max_batch, shape.heads), BLOCK_TOKENS, dtype=torch.int32, device=device)

    def local(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._local[0][:count], self._local[1][:count]

    def replies(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the worker's partial outputs and their LSE, in device memory."""
        return self._replies[0][:count], self._replies[1][:count]

    def served(self, count: int) -> torch.Tensor:
        """Return ``[count]``: 1 for rows that the worker served. Stays 0 without a worker."""
        return self._served[:count]

    def full(self, count: int) -> torch.Tensor:
        """Return the tokens in the last block of each list: always 32, because the worker gets full blocks."""
        return self._full[:count]


class MissBuffers(PartialBuffers):
    """Partial results of a layer, and the workspace for estimates of its blocks, for policies that select blocks."""

    def __init__(self, shape: DeviceShape, device: torch.device | str) -> None:
        super().__init__(shape, device)
        self._estimates = ScoreWorkspace(shape.max_batch, shape.heads, shape.group, shape.max_blocks, device)

    @functools.cache  # noqa: B019
    def scoring(self, count: int) -> ScoreWorkspace:
        return self._estimates.of_batch(count)


def plan_for(shape: DeviceShape, slots: int, device: torch.device | str) -> RecallPlan:
    return RecallPlan(shape.max_batch * shape.heads * slots, device)
