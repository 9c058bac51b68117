"""Register the policies of this package. An implementation is imported when it is created, because it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.infinigen.options import COLUMN_BYTES, InfinigenOptions, partial_columns
from sglang_hybrid.policies.registry import Needs, PolicyContext, register_policy
from sglang_hybrid.policies.scout.options import ScoutAttentionOptions, ScoutOptions
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS

if TYPE_CHECKING:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.engines.cuda.program import StepProgram
    from sglang_hybrid.memory.capacity import KVShape
    from sglang_hybrid.memory.device_capacity import RowBytes
    from sglang_hybrid.policies.base import DecodePolicy


def _everything(_config: HybridConfig) -> None:
    return None


def _budget_blocks(config: HybridConfig) -> int:
    return config.budget_tokens // BLOCK_TOKENS


def _device_full() -> type[StepProgram]:
    from sglang_hybrid.engines.cuda.full import DeviceFull

    return DeviceFull


def _device_scout() -> type[StepProgram]:
    from sglang_hybrid.engines.cuda.decode import DeviceScout

    return DeviceScout


def _device_scoutattention() -> type[StepProgram]:
    from sglang_hybrid.engines.cuda.scoutattention import DeviceScoutAttention

    return DeviceScoutAttention


def _full_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    from sglang_hybrid.memory.device_capacity import full_row_bytes

    return full_row_bytes(config, shape, max_blocks)


def _scout_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    from sglang_hybrid.memory.device_capacity import scout_row_bytes

    return scout_row_bytes(config, shape, max_blocks)


def _scoutattention_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    from sglang_hybrid.memory.device_capacity import scoutattention_row_bytes

    return scoutattention_row_bytes(config, shape, max_blocks)


def _device_hgca() -> type[StepProgram]:
    from sglang_hybrid.engines.cuda.hgca import DeviceHgca

    return DeviceHgca


def _hgca_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    from sglang_hybrid.memory.device_capacity import hgca_row_bytes

    return hgca_row_bytes(config, shape, max_blocks)


def _not_by_device_hgca(config: HybridConfig) -> str | None:
    from sglang_hybrid.engines.cuda.settings import unsupported_by_hgca

    return unsupported_by_hgca(config)


def _device_infinigen() -> type[StepProgram]:
    from sglang_hybrid.engines.cuda.infinigen import DeviceInfinigen

    return DeviceInfinigen


def _infinigen_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    from sglang_hybrid.memory.device_capacity import infinigen_row_bytes

    return infinigen_row_bytes(config, shape, max_blocks)


def _device_hcattention() -> type[StepProgram]:
    from sglang_hybrid.engines.cuda.hcattention import DeviceHCAttention

    return DeviceHCAttention


def _hcattention_row_bytes(config: HybridConfig, shape: KVShape, max_blocks: int) -> RowBytes:
    from sglang_hybrid.memory.device_capacity import hcattention_row_bytes

    return hcattention_row_bytes(config, shape, max_blocks)


def _partial_key_bytes(config: HybridConfig, shape: KVShape) -> int:
    return COLUMN_BYTES * partial_columns(config.section(InfinigenOptions).partial_ratio, shape.key_dim)


def _not_by_device_scout(config: HybridConfig) -> str | None:
    from sglang_hybrid.engines.cuda.settings import unsupported_by_scout

    return unsupported_by_scout(config)


def _not_by_device_scoutattention(config: HybridConfig) -> str | None:
    from sglang_hybrid.engines.cuda.settings import unsupported_by_scoutattention

    return unsupported_by_scoutattention(config)


def _hcattention_code_bytes(config: HybridConfig, shape: KVShape) -> int:
    from sglang_hybrid.policies.hcattention import codebook_facts

    return codebook_facts.code_bytes(config, shape)


def _describe_hcattention(config: HybridConfig) -> str:
    from sglang_hybrid.policies.hcattention import codebook_facts

    return codebook_facts.describe(config)


@register_policy(
    "full",
    description="every token of a request is attended to",
    cuda_program=_device_full,
    cuda_row_bytes=_full_row_bytes,
    cuda_reads_fp8=True,
    native_budget=_everything,
)
def create_full(_context: PolicyContext) -> DecodePolicy:
    from sglang_hybrid.policies.full import FullPolicy

    return FullPolicy()


@register_policy(
    "scout",
    description="the best-scoring blocks of a request are attended to",
    needs=Needs(worker=True, prediction=True, thorough_steps=FIRST_STEPS, slot_codes=True),
    cuda_program=_device_scout,
    cuda_row_bytes=_scout_row_bytes,
    cuda_unsupported=_not_by_device_scout,
    cuda_reads_fp8=True,
    native_budget=_budget_blocks,
    settings=ScoutOptions,
)
def create_scout(context: PolicyContext) -> DecodePolicy:
    from sglang_hybrid.policies.scout.policy import ScoutPolicy
    from sglang_hybrid.policies.scout.rules import rules_of_scout

    rules = rules_of_scout(context.config)
    return ScoutPolicy(context.config, rules, context.misses, context.tuning, context.prompts, context.rows)


@register_policy(
    "scoutattention",
    description="as scout, but as the paper ScoutAttention has it: for comparison",
    needs=Needs(worker=True, prediction=True, prediction_by_default="raw"),
    cuda_program=_device_scoutattention,
    cuda_row_bytes=_scoutattention_row_bytes,
    cuda_unsupported=_not_by_device_scoutattention,
    cuda_reads_fp8=True,
    settings=ScoutAttentionOptions,
)
def create_scoutattention(context: PolicyContext) -> DecodePolicy:
    from sglang_hybrid.policies.scout import scoutattention

    return scoutattention.create(context)


@register_policy(
    "hgca",
    description="a window of the newest tokens and salient older ones, as the paper HGCA has it",
    needs=Needs(worker=True, masks=True, long_lists=True, digests=False),
    cuda_program=_device_hgca,
    cuda_row_bytes=_hgca_row_bytes,
    cuda_unsupported=_not_by_device_hgca,
    settings=HgcaOptions,
)
def create_hgca(context: PolicyContext) -> DecodePolicy:
    from sglang_hybrid.policies.hgca.policy import HgcaPolicy

    return HgcaPolicy(context.config.section(HgcaOptions), context.misses, context.prompts)


@register_policy(
    "hcattention",
    description="the tokens with most attention by quantised keys, as the paper HCAttention has it",
    needs=Needs(worker=True, value_sums=True, long_lists=True, digests=False, unscaled_keys=True),
    cuda_program=_device_hcattention,
    cuda_row_bytes=_hcattention_row_bytes,
    code_bytes=_hcattention_code_bytes,
    code_settings=("codebook",),
    settings=HCAttentionOptions,
    describe=_describe_hcattention,
)
def create_hcattention(context: PolicyContext) -> DecodePolicy:
    from sglang_hybrid.policies.hcattention import policy

    return policy.create(context)


@register_policy(
    "infinigen",
    description="tokens that partial keys speculate to matter, as the paper InfiniGen has it",
    needs=Needs(prediction=True, skew=True, prediction_by_default="raw"),
    cuda_program=_device_infinigen,
    cuda_row_bytes=_infinigen_row_bytes,
    code_bytes=_partial_key_bytes,
    code_settings=("partial_ratio",),
    settings=InfinigenOptions,
)
def create_infinigen(context: PolicyContext) -> DecodePolicy:
    from sglang_hybrid.policies.infinigen import policy

    return policy.create(context)
