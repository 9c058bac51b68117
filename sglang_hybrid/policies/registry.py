"""Decode policies by name: the built-in ones, and those of other packages.

A package adds a policy with a decorator and names its module in the entry point group ``sglang_hybrid.policies``::

    class WindowOptions(msgspec.Struct, frozen=True, kw_only=True):
        blocks: Annotated[int, Meta(ge=1, description="Last blocks of a request that are attended to.")] = 16

    @register_policy("window", description="the first and the last blocks of every request", settings=WindowOptions)
    def create(context: PolicyContext) -> DecodePolicy:
        return WindowPolicy(context.config.section(WindowOptions).blocks)

    [project.entry-points."sglang_hybrid.policies"]
    window = "my_package.window"

The struct becomes the section ``window`` of the configuration: a mapping ``window`` in a YAML file, and
``--hybrid window.blocks=8``. A package is imported when its policy is chosen or its section is given.
This module imports neither torch nor SGLang: commands look up policies before they load either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal

import msgspec

from sglang_hybrid.env import ConfigError

if TYPE_CHECKING:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.engines.cuda.program import StepProgram
    from sglang_hybrid.memory.capacity import KVShape
    from sglang_hybrid.memory.device_capacity import RowBytes
    from sglang_hybrid.memory.key_codes import KeyCodes
    from sglang_hybrid.memory.prompt_queries import PromptQueries
    from sglang_hybrid.policies.base import DecodePolicy
    from sglang_hybrid.policies.scout.profile_facts import ModelIdentity
    from sglang_hybrid.policies.scout.tuning import Tuning
    from sglang_hybrid.worker.miss_server import MissServer

ENTRY_POINTS = "sglang_hybrid.policies"
_BUILT_IN = "sglang_hybrid.policies.built_in"


class PolicyError(ConfigError):
    """A policy cannot serve this model with these settings. The message says why, and what to change."""


@dataclass(frozen=True)
class ModelPart:
    """The model that is served, and this process's part of it, for policies that read files about a model."""

    identity: Callable[[], ModelIdentity]  # of the whole model; raises ProfileError for a model that has none
    kv_heads: slice  # of this process, among those of the whole model


@dataclass(frozen=True)
class PolicyContext:
    """The arguments from which the torch implementation of a policy is created."""

    config: HybridConfig
    rows: int  # maximum number of requests at a time
    layers: int
    misses: MissServer  # computes attention over missed blocks
    prompts: PromptQueries  # last queries of prefill
    tuning: Tuning  # per layer, from a profile or from the settings
    codes: KeyCodes | None = None  # of the pool's keys, if the policy declares ``code_bytes``
    model: ModelPart | None = None  # None: unknown, as in tests


@dataclass(frozen=True)
class Needs:
    """What a server has to set up for a policy."""

    worker: bool = False  # a CPU worker that computes attention over blocks
    prediction: bool = False  # queries that are predicted one layer ahead
    masks: bool = False  # block lists for the worker have masks of tokens (``BlockList.masks``)
    long_lists: bool = False  # block lists for the worker may be as long as the context, whatever the budget
    value_sums: bool = False  # the worker sums values by weights that the policy computed (``MissServer.post_sum``)
    skew: bool = False  # codes are partial keys, in a basis that a calibration or a profile has
    thorough_steps: int = 0  # first decode steps of a row longer than the budget, which attend to everything
    digests: bool = True  # digests and sketches of all blocks, on the model's device
    slot_codes: bool = False  # slots in GPU memory can keep codes of 8 bits (``scout.slot_dtype``)
    unscaled_keys: bool = False  # codes of keys would be wrong over an FP8 KV cache whose keys have a scale
    # what prediction=auto means; None: calibrated if there is a profile or a calibration, otherwise none
    prediction_by_default: Literal["raw"] | None = None


@dataclass(frozen=True)
class Policy:
    """A registered policy."""

    name: str
    description: str  # what it attends to, in a few words
    create: Callable[[PolicyContext], DecodePolicy]  # the torch implementation
    needs: Needs
    # returns the class of the step program that CUDA graphs are recorded from; None: served by the torch engine
    cuda_program: Callable[[], type[StepProgram]] | None
    # returns the device memory of a row of at most the given blocks, without torch; required with ``cuda_program``
    cuda_row_bytes: Callable[[HybridConfig, KVShape, int], RowBytes] | None
    # returns the settings that the step program does not support, in words; without the function it supports all
    cuda_unsupported: Callable[[HybridConfig], str | None] | None
    cuda_reads_fp8: bool  # whether the step program's kernels read an FP8 KV cache
    # returns the blocks that a row attends to in the native CPU engine, None: all; no function: the torch engine serves
    native_budget: Callable[[HybridConfig], int | None] | None
    # returns the bytes kept of every key of a KV head on the model's device, beside digests; no function: none
    code_bytes: Callable[[HybridConfig, KVShape], int] | None
    # settings of the policy's section on which codes of keys depend: they cannot change while keys are in the pool
    code_settings: tuple[str, ...]
    settings: type[msgspec.Struct] | None  # the policy's section of the configuration; None: no section
    # returns what the settings result in, as a sentence for ``sglang-hybrid config``; raises PolicyError
    describe: Callable[[HybridConfig], str] | None

    def attends_to_all(self, config: HybridConfig) -> bool:
        """Return True if every block of a row is attended to, which only a policy with ``native_budget`` can say."""
        return self.native_budget is not None and self.native_budget(config) is None


class UnknownPolicy(ValueError):
    """No policy of this name is registered. The message lists the names of policies."""


_policies: dict[str, Policy] = {}


def register_policy(
    name: str,
    *,
    description: str,
    needs: Needs | None = None,
    cuda_program: Callable[[], type[StepProgram]] | None = None,
    cuda_row_bytes: Callable[[HybridConfig, KVShape, int], RowBytes] | None = None,
    cuda_unsupported: Callable[[HybridConfig], str | None] | None = None,
    cuda_reads_fp8: bool = False,
    native_budget: Callable[[HybridConfig], int | None] | None = None,
    code_bytes: Callable[[HybridConfig, KVShape], int] | None = None,
    code_settings: tuple[str, ...] = (),
    settings: type[msgspec.Struct] | None = None,
    describe: Callable[[HybridConfig], str] | None = None,
) -> Callable[[Callable[[PolicyContext], DecodePolicy]], Callable[[PolicyContext], DecodePolicy]]:
    """Decorate the function that creates the torch implementation of a policy.

    ``settings``: a frozen struct whose fields have defaults and descriptions. The other arguments are the fields of
    ``Policy``. Raise ValueError for a name that is taken, for only one of ``cuda_program`` and ``cuda_row_bytes``, and
    for settings that cannot be a section of the configuration.
    """

    def register(create: Callable[[PolicyContext], DecodePolicy]) -> Callable[[PolicyContext], DecodePolicy]:
        if name in _policies:
            raise ValueError(f"there is a policy {name} already, made by {_policies[name].create.__module__}")
        if (cuda_program is None) != (cuda_row_bytes is None):
            raise ValueError(f"policy {name} needs both of cuda_program and cuda_row_bytes, or neither")
        if settings is not None:
            _check_settings(name, settings)
        _policies[name] = Policy(
            name, description, create, needs or Needs(), cuda_program, cuda_row_bytes, cuda_unsupported,
            cuda_reads_fp8, native_budget, code_bytes, code_settings, settings, describe,
        )  # fmt: skip
        return create

    return register


def _check_settings(name: str, settings: type[msgspec.Struct]) -> None:
    from sglang_hybrid.config import HybridConfig  # which imports this module

    if name in HybridConfig.__struct_fields__ or not name.replace("-", "_").isidentifier():
        raise ValueError(f"policy {name} has settings and needs a name that no setting has, of letters and digits")
    if not settings.__struct_config__.frozen:
        raise ValueError(f"the settings of policy {name} must be frozen: class {settings.__name__}(..., frozen=True)")
    if required := [field.name for field in msgspec.structs.fields(settings) if field.required]:
        raise ValueError(f"settings of policy {name} must have defaults: {', '.join(required)}")
    if any(policy.settings is settings for policy in _policies.values()):
        raise ValueError(f"{settings.__name__} has the settings of another policy: policy {name} needs its own struct")


def loaded_policies() -> list[Policy]:
    """Return the built-in policies, and those of packages that are loaded."""
    import_module(_BUILT_IN)
    return list(_policies.values())


def policies_with_settings() -> list[Policy]:
    """Return the loaded policies with a section in the configuration."""
    return [policy for policy in loaded_policies() if policy.settings is not None]


def policy_names() -> list[str]:
    """Return all policy names that a configuration may have, without importing other packages."""
    import_module(_BUILT_IN)
    return sorted({*_policies, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def has_policy(name: str) -> bool:
    """Return True if a configuration may name this policy. Installed packages are searched only if necessary."""
    import_module(_BUILT_IN)
    return name in _policies or bool(entry_points(group=ENTRY_POINTS, name=name))


def policy_named(name: str) -> Policy:
    """Return the policy of this name, and import its package if necessary. Raise UnknownPolicy."""
    import_module(_BUILT_IN)
    if name not in _policies:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()
    if name not in _policies:
        raise UnknownPolicy(f"there is no policy {name}: there are {', '.join(policy_names())}")
    return _policies[name]


def keeps_codes_in_slots(config: HybridConfig) -> bool:
    """Return True if these settings ask for slots in GPU memory that keep codes of 8 bits.

    What ``scout.slot_dtype=auto`` asks for depends on the model, too: a server calls ``slot_dtype.settled`` first.
    """
    if not policy_named(config.policy).needs.slot_codes:
        return False
    dtype = config.scout.slot_dtype
    return dtype == "int8" or (dtype == "auto" and calibrates_at_start(config, on_gpu=True))


def calibrates_at_start(config: HybridConfig, *, on_gpu: bool) -> bool:
    """Return True if these settings need what a server fits at its start: predictor, skew of keys, steps of codes."""
    needs = policy_named(config.policy).needs
    predicts = config.prediction == "calibrated" or (config.prediction == "auto" and not needs.prediction_by_default)
    encodes = on_gpu and needs.slot_codes and config.scout.slot_dtype == "int8"
    if not needs.skew and not (needs.prediction and predicts) and not encodes:
        return False
    return config.profile == "auto" or (config.profile == "default" and (on_gpu or config.prediction == "calibrated"))


def prediction_of(config: HybridConfig, *, is_calibrated: bool) -> str:
    """Return ``calibrated``, ``raw`` or ``none``: the prediction of the policy that these settings name."""
    needs = policy_named(config.policy).needs
    if not needs.prediction:
        return "none"
    if config.prediction != "auto":
        return config.prediction
    # raw predictions are fast and cost accuracy: they are the default only of a policy that is built on them
    return needs.prediction_by_default or ("calibrated" if is_calibrated else "none")
