"""Policy ``hgca`` on a GPU: a ring of slots for the newest blocks, and salient tokens before them on the worker.

    main lane     contextual sets -> post -> append -> attention over slots -> averages -> merging -> what is late
    reply lane    replies of the worker, when they are there        beside attention

The worker gets the layer's real query and computes beside the window's attention. Averages of attention weights are
kept beside the slots: when a block leaves the ring, its averages determine which of its tokens are salient
(``policies/hgca/policy.py`` has the rules). All kernels are launched with static shapes on persistent buffers, so a
whole step can be recorded in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.buffers import PartialBuffers
from sglang_hybrid.engines.cuda.lanes import Lane
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.program import ProgramContext, SlotProgram
from sglang_hybrid.engines.cuda.slots import ResidentSlots
from sglang_hybrid.engines.cuda.watch import RatioWatch
from sglang_hybrid.ops.cuda.attention import Partial, attend_slots, merge
from sglang_hybrid.ops.cuda.digests import append
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.missed import finish_late
from sglang_hybrid.ops.cuda.salience import LayerWindow, MaskedLists, contextual_sets, move_averages
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.policies.hgca.options import HgcaOptions


@dataclass(frozen=True)
class HgcaSettings:
    """Settings of policy ``hgca`` as arguments of the kernels."""

    slots: int  # blocks of the window
    alpha: float
    beta: float
    deadline_s: float  # maximum time that a layer waits for the worker

    @classmethod
    def of(cls, config: HybridConfig) -> HgcaSettings:
        options = config.section(HgcaOptions)
        slots = options.window_tokens // BLOCK_TOKENS
        return cls(slots, options.alpha, options.beta, config.worker_deadline_ms / 1000)


class DeviceHgca(SlotProgram):
    """Step program of policy ``hgca``: the state of all rows, and the order of kernels."""

    loads_initial_blocks: ClassVar[bool] = True

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        settings: HgcaSettings,
        mailbox: DeviceMailboxClient | None,
    ) -> None:
        """``mailbox``: mailbox of the worker that attends to contextual sets; None: the GPU reads the pool."""
        device, dtype = layers[0].digests.digests.device, layers[0].digests.dtype
        slots = ResidentSlots(len(layers), shape.rows, shape.heads, settings.slots, shape.dim, dtype, device)
        super().__init__(layers, shape, slots)
        self._settings, self._mailbox = settings, mailbox
        of_masks = (shape.rows, shape.heads, shape.max_blocks)
        self.windows = [
            LayerWindow(
                self.slots.keys[layer],
                self.slots.values[layer],
                self.slots.positions(layer),
                torch.zeros(shape.rows, shape.heads, settings.slots, BLOCK_TOKENS, device=device),
                torch.zeros(of_masks, dtype=torch.int32, device=device),
            )
            for layer in range(len(layers))
        ]
        self._partials = PartialBuffers(shape, device)
        self._lists = MaskedLists(shape.max_batch, shape.heads, shape.max_blocks, device)
        self._receipt = mailbox.new_receipt(shape.max_batch) if mailbox else None
        # tokens in contextual sets of each layer, summed over all steps
        self.counted = torch.zeros(len(layers), 1, dtype=torch.int64, device=device)
        self._replies = Lane(device, urgent=True)

    @classmethod
    def create(cls, context: ProgramContext) -> Self:
        return cls(context.layers, context.shape, HgcaSettings.of(context.config), context.mailbox)

    @property
    def without_whole_requests(self) -> str:
        return f"the newest {self._settings.slots * BLOCK_TOKENS} tokens of each are attended, and salient older ones"

    def near_tokens(self, config: HybridConfig) -> int:
        return self._settings.slots * BLOCK_TOKENS

    def new_watch(self, context: ProgramContext) -> RatioWatch:
        window_tokens = self._shape.heads * self._settings.slots * BLOCK_TOKENS
        mailbox = context.mailbox.counts if context.mailbox else None
        return RatioWatch(self.counted, window_tokens, mailbox, self.block_bytes)

    # -- steps and rows ----------------------------------------------------------------------

    def load_initial_blocks(self, layer: int, step: Step, query: torch.Tensor, scale: float) -> None:
        contextual_sets(
            query, self._layers[layer].pool, step, self.windows[layer], scale, self._settings.beta, refused=self.refused
        )

    # -- one layer ---------------------------------------------------------------------------

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.is_dense:
            return self.dense.decode(layer, query, keys, values, scale)
        count, of_layer, window = query.shape[0], self._layers[layer], self.windows[layer]
        step, lists = self.step.of_batch(count), self._lists_of(count)
        contextual_sets(
            query, of_layer.pool, step, window, scale, self._settings.beta, begins=self.step.begins(count),
            lists=lists, counted=self.counted[layer], refused=self.refused,
        )  # fmt: skip
        replies = self._post(layer, query, lists, step, scale)
        append(
            of_layer.digests, window.table(), step, keys, values, window.keys, window.values, of_layer.pool,
            refused=self.refused,
        )  # fmt: skip
        local, out = self._partials.local(count), self._attention.out(count)
        attend_slots(
            query, window.keys, window.values, window.positions, self.step.lengths, step.row_of, scale,
            active_rows=step.active_rows, workspace=self._attention.attending(count), out=local[0], lse=local[1],
        )  # fmt: skip
        move_averages(
            query, window, self.step.lengths, step.row_of, scale, local[1], self._settings.alpha,
            active_rows=step.active_rows,
        )  # fmt: skip
        if replies is not None:
            self._replies.wait_for(layer)
            merge(local, replies, active_rows=step.active_rows, out=out)
        finish_late(
            query, of_layer.pool, step, lists.pages, lists.counts, scale, local, out,
            served=self._partials.served(count), workspace=self._attention.attending(count), masks=lists.masks,
        )  # fmt: skip
        return out

    def _post(self, layer: int, query: torch.Tensor, lists: MaskedLists, step: Step, scale: float) -> Partial | None:
        """Post the layer, and wait for the replies on the reply lane. Return None if there is no worker to post to."""
        if self._mailbox is None or self._receipt is None:
            return None
        count = query.shape[0]
        receipt = self._mailbox.receipt_of_batch(self._receipt, count)
        self._mailbox.post(
            query, lists.pages, lists.counts, self._partials.full(count), layer, scale, receipt,
            begins_step=layer == 0, active_rows=step.active_rows, masks=lists.masks,
        )  # fmt: skip
        out, lse = self._partials.replies(count)
        with self._replies.fork():
            self._mailbox.wait(receipt, self._settings.deadline_s, out, lse, self._partials.served(count))
            self._replies.mark(layer)
        return out, lse

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def _lists_of(self, count: int) -> MaskedLists:
        return self._lists.of_batch(count)
