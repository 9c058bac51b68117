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
This module imports neither torch nor SGLang: commands ask about policies before they load either.
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
    """A policy cannot serve this model by its settings. The message says why, and what to change."""


@dataclass(frozen=True)
class ModelPart:
    """Which model is served, and which part of it by this process: for policies that read files about a model."""

    identity: Callable[[], ModelIdentity]  # of the whole model; raises ProfileError for a model that has none
    kv_heads: slice  # of this process, among those of the whole model


@dataclass(frozen=True)
class PolicyContext:
    """What the torch implementation of a policy is made from."""

    config: HybridConfig
    rows: int  # requests at a time, at most
    layers: int
    misses: MissServer  # computes attention over blocks that are not near
    prompts: PromptQueries  # last queries of prefill
    tuning: Tuning  # per layer, from a profile or from the settings
    codes: KeyCodes | None = None  # of the pool's keys, where the policy declares ``code_bytes``
    model: ModelPart | None = None  # None: nobody knows, as in tests


@dataclass(frozen=True)
class Needs:
    """What has to be set up for a policy."""

    worker: bool = False  # a CPU worker that computes attention over blocks
    prediction: bool = False  # queries one layer ahead
    masks: bool = False  # block lists for the worker have masks of tokens (``BlockList.masks``)
    long_lists: bool = False  # block lists for the worker may be as long as the context, whatever the budget
    value_sums: bool = False  # the worker sums values by weights that the policy computed (``MissServer.post_sum``)
    skew: bool = False  # codes are partial keys, in a basis that a calibration or a profile has
    thorough_steps: int = 0  # first decode steps of a row beyond the budget, which look at everything
    digests: bool = True  # digests and sketches of all blocks, on the model's device
    # what prediction=auto is; None: calibrated where there is a profile or a calibration, none without
    prediction_by_default: Literal["raw"] | None = None


@dataclass(frozen=True)
class Policy:
    """One entry of the registry."""

    name: str
    description: str  # what it attends to, in a few words
    create: Callable[[PolicyContext], DecodePolicy]  # the torch implementation
    needs: Needs
    # returns the class of the step program that CUDA graphs are recorded from; None: served by the torch engine
    cuda_program: Callable[[], type[StepProgram]] | None
    # returns the device memory of a row of so many blocks at most, without torch; there is one where there is a program
    cuda_row_bytes: Callable[[HybridConfig, KVShape, int], RowBytes] | None
    # returns which of the settings the step program cannot have, in words; without the function it can have all
    cuda_unsupported: Callable[[HybridConfig], str | None] | None
    # blocks that a row attends to in the native CPU engine, None for all; without the function: the torch engine
    native_budget: Callable[[HybridConfig], int | None] | None
    # bytes kept of every key of a KV head on the model's device, beside digests; without the function: nothing is
    code_bytes: Callable[[HybridConfig, KVShape], int] | None
    # settings of its section that codes of keys depend on, and so cannot change while keys are kept
    code_settings: tuple[str, ...]
    settings: type[msgspec.Struct] | None  # its section of the configuration; None: it has none
    # what its settings come to, in a sentence for ``sglang-hybrid config``; raises PolicyError
    describe: Callable[[HybridConfig], str] | None


class UnknownPolicy(ValueError):
    """Nobody registered a policy of this name. The message lists those that there are."""


_policies: dict[str, Policy] = {}


def register_policy(
    name: str,
    *,
    description: str,
    needs: Needs | None = None,
    cuda_program: Callable[[], type[StepProgram]] | None = None,
    cuda_row_bytes: Callable[[HybridConfig, KVShape, int], RowBytes] | None = None,
    cuda_unsupported: Callable[[HybridConfig], str | None] | None = None,
    native_budget: Callable[[HybridConfig], int | None] | None = None,
    code_bytes: Callable[[HybridConfig, KVShape], int] | None = None,
    code_settings: tuple[str, ...] = (),
    settings: type[msgspec.Struct] | None = None,
    describe: Callable[[HybridConfig], str] | None = None,
) -> Callable[[Callable[[PolicyContext], DecodePolicy]], Callable[[PolicyContext], DecodePolicy]]:
    """Decorate the function that creates the torch implementation of a policy.

    ``settings``: a frozen struct whose fields have defaults and descriptions. Raises ValueError for a name that is
    taken, a CUDA program whose memory is not known, and settings that cannot be a section of the configuration.
    """

    def register(create: Callable[[PolicyContext], DecodePolicy]) -> Callable[[PolicyContext], DecodePolicy]:
        if name in _policies:
            raise ValueError(f"there is a policy {name} already, made by {_policies[name].create.__module__}")
        if (cuda_program is None) != (cuda_row_bytes is None):
            raise ValueError(f"policy {name} needs both of cuda_program and cuda_row_bytes, or neither")
        if settings is not None:
            _check_settings(name, settings)
        _policies[name] = Policy(
            name, description, create, needs or Needs(), cuda_program, cuda_row_bytes, cuda_unsupported, native_budget,
            code_bytes, code_settings, settings, describe,
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


def policies_with_settings() -> list[Policy]:
    """Policies that have a section in the configuration: the built-in ones, and those of packages that were loaded."""
    import_module(_BUILT_IN)
    return [policy for policy in _policies.values() if policy.settings is not None]


def policy_names() -> list[str]:
    """All names that a configuration may have, without importing packages of others."""
    import_module(_BUILT_IN)
    return sorted({*_policies, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def has_policy(name: str) -> bool:
    """Whether a configuration may have this name. Looks through the installed packages only if it must."""
    import_module(_BUILT_IN)
    return name in _policies or bool(entry_points(group=ENTRY_POINTS, name=name))


def policy_named(name: str) -> Policy:
    """Raises UnknownPolicy."""
    import_module(_BUILT_IN)
    if name not in _policies:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()
    if name not in _policies:
        raise UnknownPolicy(f"there is no policy {name}: there are {', '.join(policy_names())}")
    return _policies[name]


def calibrates_at_start(config: HybridConfig, *, on_gpu: bool) -> bool:
    """Whether these settings ask for what a server fits itself: a predictor, or the skew of keys."""
    needs = policy_named(config.policy).needs
    predicts = config.prediction == "calibrated" or (config.prediction == "auto" and not needs.prediction_by_default)
    if not needs.skew and not (needs.prediction and predicts):
        return False
    return config.profile == "auto" or (config.profile == "default" and (on_gpu or config.prediction == "calibrated"))


def prediction_of(config: HybridConfig, *, is_calibrated: bool) -> str:
    """Return ``calibrated``, ``raw`` or ``none``: what these settings mean for the policy that they name."""
    needs = policy_named(config.policy).needs
    if not needs.prediction:
        return "none"
    if config.prediction != "auto":
        return config.prediction
    # raw predictions are fast and cost accuracy: only a policy that is made of them has them without asking
    return needs.prediction_by_default or ("calibrated" if is_calibrated else "none")
