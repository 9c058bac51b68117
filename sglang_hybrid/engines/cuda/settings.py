"""Settings that the CUDA kernels support, and the settings of policy ``scout`` as arguments of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.registry import keeps_codes_in_slots, loaded_policies, policy_named
from sglang_hybrid.policies.scout.paper import paper_resident_tokens
from sglang_hybrid.policies.scout.tuning import (
    COPYING_INTERVAL,
    FIRST_SHARE,
    FIRST_STEPS,
    Tuning,
    resident_tokens_of,
)

if TYPE_CHECKING:  # this import needs torch, which ``sglang-hybrid config`` does not
    from sglang_hybrid.policies.scout.profile import HostRates

_DIMS, _CHANNELS, _MOST_BLOCKS = (64, 128), (0, 32, 64), 256  # shapes that the kernels support
_MOST_WINDOW_BLOCKS = 1024  # of policy hgca: the partial results of a list of slots must fit in shared memory


@dataclass(frozen=True)
class WholeSteps:
    """The first decode steps of long rows, in which a row attends to all blocks that matter, resident or not."""

    beyond: int  # tokens: only rows longer than this have such steps
    steps: int  # number of such steps per row


@dataclass(frozen=True)
class ScoutSettings:
    budget: int  # blocks
    slots: int  # blocks of a (row, KV head) in device memory
    sink: int
    recent: int
    bonus: tuple[float, ...]  # per layer, added to the score of resident blocks
    min_miss_score: tuple[float, ...]  # per layer, minimum score of a miss
    any_block: tuple[bool, ...]  # per layer, whether every block with this score is a miss, or only selected blocks
    gather_share: float | None  # share of the misses that is copied to the device; None: adapts to traffic
    deadline_s: float
    has_codes: bool = False  # whether slots keep codes of 8 bits, of which each layer has the steps
    early_recalls: int = FIRST_STEPS  # first steps of a row in which all layers recall
    whole: WholeSteps | None = None
    whole_score: float = -math.inf  # minimum score of a block that is attended in these steps


# Rates without a profile: of a gather over PCIe 5 while the GPU does nothing else, until decode steps have measured
# theirs, and of a core that reads memory (docs/measurements.md).
_GATHER_GB_S, _CORE_GB_S = 50.0, 8.0
_HIDDEN = 0.6  # share of a layer's time in which the worker can compute without making the GPU wait
# The same share for copies. It is smaller, because copies must be complete when attention begins, and the worker's
# results only when attention ends. The value was not measured itself: with 48 rows of 30k tokens it results in the
# gather shares that were fastest ("Who serves misses" in docs/measurements.md).
_GATHER_HIDDEN = 0.35
FIRST_GATHER_SHARE = 0.5  # initial value, until the counters of the first steps arrive
# Bounds of the target CPU compute ratio. Below, recalls would cost more than they save; above, intervals get so long
# that they follow traffic too slowly.
_TARGETS = (0.03, 0.25)


@dataclass(frozen=True)
class PathRates:
    """Rates of both ways to serve a miss, in bytes per second: the GPU gathers the block, or the worker computes."""

    gathers: float
    computes: float

    def gather_share(self, missed: float, recalled: float, layer_seconds: float) -> float:
        """Return the share of a layer's misses to gather. ``missed`` and ``recalled``: bytes of the layer in one step.

        Gather as much as PCIe can copy, beside recalls, before attention waits: gathered blocks are attended with the
        real query, the worker's blocks with a predicted one. Gather more only if the worker could not compute the rest
        in time: then both ways end at the same time. With a share g, copies take (g missed + recalled) / gathers, and
        the worker takes (1 - g) missed / computes.
        """
        if missed <= 0:
            return 1.0
        share = (self.gathers * layer_seconds * _GATHER_HIDDEN - recalled) / missed
        if (1 - share) * missed > self.computes * layer_seconds * _HIDDEN:
            left = missed / self.computes - recalled / self.gathers
            share = max(share, left / (missed / self.gathers + missed / self.computes))
        return min(1.0, max(0.0, share))

    def target_ratio(self, budget: float, layer_seconds: float) -> float:
        """Return the CPU compute ratio that costs no time. ``budget``: bytes of all rows' budgets in one layer."""
        low, high = _TARGETS
        return min(high, max(low, self.computes * layer_seconds * _HIDDEN / max(budget, 1.0)))


def path_rates(rates: HostRates | None, cores: int) -> PathRates:
    """Return the rates that a profile measured on a host with a GPU, or else estimates for ``cores`` cores."""
    if rates and rates.transfer_gb_s:
        return PathRates(1e9 * rates.transfer_gb_s, 1e9 * rates.attention_gb_s)
    return PathRates(1e9 * _GATHER_GB_S, 1e9 * max(1, cores) * _CORE_GB_S)


def gather_share_of(config: HybridConfig) -> float | None:
    """Return the fixed share of misses to gather. None: the share adapts to traffic, by ``PathRates``."""
    if config.worker == "none":
        return 1.0  # the device attends to all misses
    return None if config.scout.cpu_share == "auto" else 1 - config.scout.cpu_share


def scout_tuning(config: HybridConfig, tuning: Tuning, has_profile: bool) -> Tuning:
    """Return ``tuning`` with the recall interval that is the default where misses are copied to the device."""
    is_default = config.scout.recall_interval == "auto" and not has_profile
    if not is_default or gather_share_of(config) == 0:
        return tuning
    return replace(tuning, intervals=(COPYING_INTERVAL,) * len(tuning.intervals))


def settings_of(config: HybridConfig, tuning: Tuning, group: int) -> ScoutSettings:
    whole = whole_steps_of(config, tuning)
    return ScoutSettings(
        budget=config.budget_tokens // BLOCK_TOKENS,
        slots=slots_of(config),
        sink=config.sink_blocks,
        recent=config.recent_blocks,
        bonus=tuning.bonus,
        min_miss_score=tuple(math.log(share * group) if share else -math.inf for share in tuning.miss_shares),
        any_block=tuning.any_block,
        gather_share=gather_share_of(config),
        deadline_s=config.worker_deadline_ms / 1000,
        has_codes=keeps_codes_in_slots(config),
        whole=whole,
        whole_score=-math.inf if 0 in tuning.intervals else math.log(FIRST_SHARE * group),
    )


def whole_steps_of(config: HybridConfig, tuning: Tuning) -> WholeSteps | None:
    steps = policy_named(config.policy).needs.thorough_steps
    if not steps:
        return None
    # Layers that recall score blocks by the real query. If a layer never recalls, a single step attends to all blocks.
    return WholeSteps(config.budget_tokens, steps=1 if 0 in tuning.intervals else steps)


def slots_of(config: HybridConfig) -> int:
    """Return the number of slots per (row, KV head): blocks that are in device memory."""
    return _slots_for(config, resident_tokens_of(config))


def paper_slots_of(config: HybridConfig) -> int:
    """Return the number of slots per (row, KV head) under policy scoutattention."""
    return _slots_for(config, paper_resident_tokens(config))


def _slots_for(config: HybridConfig, resident_tokens: int) -> int:
    always = config.sink_blocks + config.recent_blocks + 1
    return max(always, resident_tokens // BLOCK_TOKENS)


def paper_settings_of(config: HybridConfig, tuning: Tuning) -> ScoutSettings:
    """Return the settings of policy scoutattention. The worker computes all misses; without one the GPU reads them."""
    layers = len(tuning.intervals)
    return ScoutSettings(
        budget=config.budget_tokens // BLOCK_TOKENS,
        slots=paper_slots_of(config),
        sink=config.sink_blocks,
        recent=config.recent_blocks,
        bonus=tuning.bonus,
        min_miss_score=(-math.inf,) * layers,
        any_block=tuning.any_block,
        gather_share=0.0,
        deadline_s=config.worker_deadline_ms / 1000,
        early_recalls=0,
    )


def hgca_slots_of(config: HybridConfig) -> int:
    """Return the number of slots per (row, KV head) under policy hgca: the blocks of its window."""
    return config.section(HgcaOptions).window_tokens // BLOCK_TOKENS


def unsupported_settings(config: HybridConfig) -> str | None:
    """Return the settings that the kernels do not support, in words; None if they support all of them."""
    policy = policy_named(config.policy)
    if policy.cuda_program is None:
        return f"policy={config.policy}"
    if policy.needs.digests and config.sketch_channels not in _CHANNELS:
        return f"sketch_channels={config.sketch_channels}"
    return policy.cuda_unsupported(config) if policy.cuda_unsupported else None


def unsupported_by_scout(config: HybridConfig) -> str | None:
    """Return the settings of policy scout that the kernels do not support, in words; None if they support all."""
    return _too_many_blocks(config, slots_of(config))


def unsupported_by_scoutattention(config: HybridConfig) -> str | None:
    return _too_many_blocks(config, paper_slots_of(config))


def _too_many_blocks(config: HybridConfig, slots: int) -> str | None:
    if max(config.budget_tokens // BLOCK_TOKENS, slots) > _MOST_BLOCKS:
        return f"more than {_MOST_BLOCKS * BLOCK_TOKENS} tokens in the budget"
    return None


def unsupported_by_hgca(config: HybridConfig) -> str | None:
    """Return the settings of policy hgca that the kernels do not support, in words; None if they support all.

    The kernels need a window of a fixed size, whose blocks are a ring of slots.
    """
    options = config.section(HgcaOptions)
    if options.window_ratio:
        return f"hgca.window_ratio={options.window_ratio}"
    if hgca_slots_of(config) > _MOST_WINDOW_BLOCKS:
        return f"a window of more than {_MOST_WINDOW_BLOCKS * BLOCK_TOKENS} tokens"
    return None


def unsupported_over_fp8(policy: str) -> str | None:
    """Return why the kernels cannot run this policy over an FP8 KV cache, in words; None if they can."""
    if policy_named(policy).cuda_reads_fp8:
        return None
    able = ", ".join(one.name for one in loaded_policies() if one.cuda_reads_fp8)
    return f"policy={policy} over an FP8 KV cache, which {able} can have"


def unsupported_model(head_dim: int, value_dim: int, group: int, itemsize: int) -> str | None:
    """Return what of a model's shape the kernels do not support, in words; None if they support all.

    ``itemsize``: bytes of a number in the KV cache.
    """
    if head_dim not in _DIMS or value_dim != head_dim:
        return f"head_dim {head_dim} (values: {value_dim})"
    if group > 16:
        return f"{group} query heads per KV head"
    if itemsize not in (1, 2):
        return "a KV cache that is neither of 16 bits nor FP8"
    return None
