"""Policy ``hcattention`` on a GPU: attention weights by codes in device memory, sums of values by the worker.

    main lane     store -> logits -> kept tokens -> post -> replies, when they are there -> what is late

The GPU computes nothing while the worker sums: a layer's output is the worker's sums. If the worker does not serve a
row, the GPU sums the row and reads the values of kept tokens from the host pool. This includes rows with a list longer
than the mailbox holds, which the worker refuses. Whole rows are never held in device memory, and rows have no state.
All kernels are launched with static shapes on persistent buffers, so a whole step can be recorded in a CUDA graph.

The worker reads the value of a step's own token from the pool: a launch before the post writes this value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.buffers import PartialBuffers
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.program import ProgramContext, StepProgram
from sglang_hybrid.engines.cuda.slots import BlockMemory
from sglang_hybrid.engines.cuda.watch import RatioWatch
from sglang_hybrid.memory.pool import KVPool
from sglang_hybrid.ops.cuda.kept_tokens import (
    SHARE_UNITS,
    KeptTokens,
    SumWorkspace,
    finish_sums,
    keep_tokens,
    token_logits,
)
from sglang_hybrid.ops.cuda.key_codes import QuantisedCodes
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.policies.hcattention.codebooks import QuantisedKeys
from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.hcattention.policy import use_codebook
from sglang_hybrid.policies.registry import ModelPart, PolicyError


@dataclass(frozen=True)
class HCAttentionSettings:
    """Settings of policy ``hcattention`` as arguments of the kernels."""

    tau: float
    renormalises: bool
    deadline_s: float  # maximum time that a layer waits for the worker

    @classmethod
    def of(cls, config: HybridConfig) -> HCAttentionSettings:
        options = config.section(HCAttentionOptions)
        return cls(options.tau, options.renormalise, config.worker_deadline_ms / 1000)


class DeviceHCAttention(StepProgram):
    """Step program of policy ``hcattention``: the order of kernels, and the buffers between them."""

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        settings: HCAttentionSettings,
        mailbox: DeviceMailboxClient | None,
    ) -> None:
        """``mailbox``: mailbox of the worker that sums values; None: the GPU reads all values from the host pool."""
        device, dtype = layers[0].digests.digests.device, layers[0].digests.dtype
        super().__init__(layers, shape, BlockMemory(len(layers), shape.rows, shape.heads, 0, shape.dim, dtype, device))
        self._settings, self._mailbox, self._device = settings, mailbox, device
        self._codes = [_codes_of(layer) for layer in layers]
        self._kept = KeptTokens.zeros(shape.max_batch, shape.heads, shape.group, shape.max_blocks, device)
        self._partials = PartialBuffers(shape, device)
        self._receipt = mailbox.new_receipt(shape.max_batch) if mailbox else None
        # shares of tokens that query heads keep in each layer, summed over all steps and query heads
        self.counted = torch.zeros(len(layers), 1, dtype=torch.int64, device=device)

    @classmethod
    def create(cls, context: ProgramContext) -> Self:
        return cls(context.layers, context.shape, HCAttentionSettings.of(context.config), context.mailbox)

    @classmethod
    def layer_codes(cls, config: HybridConfig, pool: KVPool, model: ModelPart | None) -> list[QuantisedCodes]:
        """Return the codes of each layer's keys. Raise PolicyError for a codebook that does not fit the model."""
        assert pool.codes is not None  # because the policy declares code_bytes
        keys = use_codebook(config.section(HCAttentionOptions).codebook, pool.codes, model)
        return [
            codes_of_layer(pool.codes.of_layer(layer), keys, layer, pool.dtype, pool.head_dim)
            for layer in range(pool.layer_num)
        ]

    @property
    def without_whole_requests(self) -> str:
        return "the tokens of each that have most attention are attended"

    def near_tokens(self, config: HybridConfig) -> int:
        return 0  # values of all tokens are in host memory

    def new_watch(self, context: ProgramContext) -> RatioWatch:
        per_row = self._shape.heads * self._shape.group * SHARE_UNITS
        block_bytes = BLOCK_TOKENS * self._shape.dim * self._layers[0].pool.values.itemsize  # no key is read
        return RatioWatch(self.counted, per_row, context.mailbox.counts if context.mailbox else None, block_bytes)

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        count = query.shape[0]
        step, kept, out = self.step.of_batch(count), self._kept_of(count), self._attention.out(count)
        self.dense.store(layer, keys, values)  # writes to the pool, and codes of the keys
        token_logits(query, self._codes[layer], step, scale, kept)
        keep_tokens(
            step, kept, self._settings.tau, renormalises=self._settings.renormalises,
            pool_pages=self._shape.pool_pages, counted=self.counted[layer],
        )  # fmt: skip
        has_worker = self._post(layer, kept, step)
        finish_sums(
            self._layers[layer].pool, kept, out, workspace=self._workspace(count),
            served=self._partials.served(count) if has_worker else None,
            replies=self._partials.replies(count)[0] if has_worker else None, active_rows=step.active_rows,
        )  # fmt: skip
        return out

    def _post(self, layer: int, kept: KeptTokens, step: Step) -> bool:
        """Post the layer and make the stream wait for its sums. Return False if there is no worker to post to."""
        if self._mailbox is None or self._receipt is None:
            return False
        count = step.batch
        receipt = self._mailbox.receipt_of_batch(self._receipt, count)
        self._mailbox.post_sums(
            kept.weights, kept.positions, kept.pages, kept.counts, layer, receipt,
            begins_step=layer == 0, active_rows=step.active_rows,
        )  # fmt: skip
        out, lse = self._partials.replies(count)
        self._mailbox.wait(receipt, self._settings.deadline_s, out, lse, self._partials.served(count))
        return True

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def _kept_of(self, count: int) -> KeptTokens:
        return self._kept.of_batch(count)

    @functools.cache  # noqa: B019
    def _workspace(self, count: int) -> SumWorkspace:
        shape = self._shape
        return SumWorkspace(count, shape.heads, shape.group, shape.dim, self._device)


def codes_of_layer(
    codes: torch.Tensor, keys: QuantisedKeys | None, layer: int, dtype: torch.dtype, dim: int
) -> QuantisedCodes:
    """Wrap ``codes`` ``[pages, H, 32, code_bytes]`` with the layer's codebooks; ``keys`` None: codes are whole keys."""
    if keys is None:
        return QuantisedCodes(codes, dtype, dim)
    return QuantisedCodes(codes, dtype, dim, keys.codebooks(layer), keys.groups, keys.index_bytes)


def _codes_of(layer: DeviceLayer) -> QuantisedCodes:
    if not isinstance(layer.codes, QuantisedCodes):
        raise PolicyError("policy hcattention needs a KV pool with codes of keys: start with policy=hcattention")
    return layer.codes
