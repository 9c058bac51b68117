"""Policy ``scoutattention`` on a GPU: the lanes of policy ``scout``, with the rules of the paper ScoutAttention.

    scout lane    predicted query -> scores, one for all KV heads -> selection and plan              of the next layer
    post lane     its misses -> mailbox of the worker
    main lane     append -> attention over selected slots -> merging with replies -> what is late
    reply lane    replies of the worker, when they are there                                         beside attention
    recall lane   copies of the plan -> slot table                                                   of this layer

The worker computes all misses. The query that selects the misses also selects the blocks that become resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from sglang_hybrid.engines.cuda.decode import DeviceScout, handover_of
from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.program import ProgramContext
from sglang_hybrid.engines.cuda.settings import ScoutSettings, paper_settings_of
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.scoring import PendingScores, score_blocks, share_scores
from sglang_hybrid.ops.cuda.selection import RecallInterval, select_blocks
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.reference import NO_BLOCK
from sglang_hybrid.policies.scout.paper import paper_tuning
from sglang_hybrid.policies.scout.tuning import Tuning


class DeviceScoutAttention(DeviceScout):
    corrects: ClassVar[bool] = False

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        settings: ScoutSettings,
        intervals: Sequence[int],
        mailbox: DeviceMailboxClient | None,
        handover: Handover | None = None,
    ) -> None:
        super().__init__(layers, shape, settings, intervals, mailbox, handover)
        # the slot tables, with -1 for blocks that are not selected in this step
        self._attended_slots = [torch.full_like(table.positions, NO_BLOCK) for table in self._tables]

    @classmethod
    def create(cls, context: ProgramContext) -> Self:
        tuning = cls.tuning_in(context)
        settings = paper_settings_of(context.config, tuning)
        made = cls(context.layers, context.shape, settings, tuning.intervals, context.mailbox, handover_of(context))
        made.recall_joins_at_logits = context.has_logits
        return made

    @staticmethod
    def tuning_in(context: ProgramContext) -> Tuning:
        return paper_tuning(context.config, context.tuning)

    def _attended(self, layer: int) -> torch.Tensor:
        return self._attended_slots[layer]

    def _select(
        self, layer: int, step: Step, query: torch.Tensor, scale: float, due: torch.Tensor, predicted: bool
    ) -> None:
        settings, count = self._settings, step.batch
        scores, workspace = self._scores[layer], self._main.scoring(count)
        self._scored(score_blocks(query, self._layers[layer].digests, step, scale, workspace, scores, by_row=True))
        select_blocks(
            scores, self._tables[layer], step, settings.budget, self._lanes[layer % 2].misses(count),
            pool_pages=self._shape.pool_pages, plan=self._plans[layer], due=due,
            recall=RecallInterval(self.intervals[layer : layer + 1], self.step.first_lengths, layer),
            totals=self.counted[layer], by_row=True, attended=self._attended_slots[layer],
        )  # fmt: skip

    def _scored(self, pending: PendingScores) -> None:
        share_scores(pending)
