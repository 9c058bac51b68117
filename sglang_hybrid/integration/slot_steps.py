"""The steps of the 8-bit codes in which slots store keys and values: those of a rank, from its calibration."""

from __future__ import annotations

import torch

from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.ops.reference import with_reciprocals
from sglang_hybrid.policies.scout.corrections_file import Calibrated


def rank_steps(calibrated: Calibrated | None, pool: HostKVPool, heads: slice) -> list[torch.Tensor] | None:
    """Return the steps ``[4, heads of this rank, dim]`` of each layer of ``pool``, with reciprocals, on its device.

    ``heads`` are this rank's KV heads. ``calibrated`` covers the whole model or only this rank. Return None if a layer
    of the pool has no steps: profiles of earlier versions have none.
    """
    every = [] if calibrated is None else [calibrated.steps.get(pool.start_layer + n) for n in range(pool.layer_num)]
    of_layers = [with_reciprocals(_of_rank(steps, heads)).to(pool.device) for steps in every if steps is not None]
    return of_layers if len(of_layers) == pool.layer_num else None


def _of_rank(steps: torch.Tensor, heads: slice) -> torch.Tensor:
    return steps[:, heads] if steps.shape[1] != heads.stop - heads.start else steps
