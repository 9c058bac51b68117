"""Decode policies by name: the built-in ones, and those of other packages.

A package adds a policy with a decorator and names its module in the entry point group ``sglang_hybrid.policies``::

    @register_policy("window", description="the first and the last blocks of every request")
    def create(context: PolicyContext) -> DecodePolicy:
        return WindowPolicy(context.config)

    [project.entry-points."sglang_hybrid.policies"]
    window = "my_package.window"

This module imports neither torch nor SGLang: commands ask about policies before they load either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.memory.prompt_queries import PromptQueries
    from sglang_hybrid.misses.base import MissServer
    from sglang_hybrid.policies.base import DecodePolicy
    from sglang_hybrid.scout.tuning import Tuning

ENTRY_POINTS = "sglang_hybrid.policies"
_BUILT_IN = "sglang_hybrid.policies.built_in"


@dataclass(frozen=True)
class PolicyContext:
    """What the torch implementation of a policy is made from."""

    config: HybridConfig
    rows: int  # requests at a time, at most
    layers: int
    misses: MissServer  # computes attention over blocks that are not near
    prompts: PromptQueries  # last queries of prefill
    tuning: Tuning  # per layer, from a profile or from the settings


@dataclass(frozen=True)
class Needs:
    """What has to be set up for a policy."""

    worker: bool = False  # a CPU worker that computes attention over blocks
    prediction: bool = False  # queries one layer ahead, calibrated by a profile where there is one


@dataclass(frozen=True)
class Policy:
    """One entry of the registry."""

    name: str
    description: str  # what it attends to, in a few words
    create: Callable[[PolicyContext], DecodePolicy]  # the torch implementation
    needs: Needs
    # returns the class of the step program that CUDA graphs are recorded from; None: served by the torch engine
    cuda_program: Callable[[], Any] | None
    # blocks that a row attends to in the native CPU engine, None for all; without the function: the torch engine
    native_budget: Callable[[HybridConfig], int | None] | None


class UnknownPolicy(ValueError):
    """Nobody registered a policy of this name. The message lists those that there are."""


_policies: dict[str, Policy] = {}


def register_policy(
    name: str,
    *,
    description: str,
    needs: Needs | None = None,
    cuda_program: Callable[[], Any] | None = None,
    native_budget: Callable[[HybridConfig], int | None] | None = None,
) -> Callable[[Callable[[PolicyContext], DecodePolicy]], Callable[[PolicyContext], DecodePolicy]]:
    """Decorate the function that creates the torch implementation of a policy. Raises ValueError for a taken name."""

    def register(create: Callable[[PolicyContext], DecodePolicy]) -> Callable[[PolicyContext], DecodePolicy]:
        if name in _policies:
            raise ValueError(f"there is a policy {name} already, made by {_policies[name].create.__module__}")
        _policies[name] = Policy(name, description, create, needs or Needs(), cuda_program, native_budget)
        return create

    return register


def policy_names() -> list[str]:
    """All names that a configuration may have, without importing packages of others."""
    import_module(_BUILT_IN)
    return sorted({*_policies, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def policy_named(name: str) -> Policy:
    """Raises UnknownPolicy."""
    import_module(_BUILT_IN)
    if name not in _policies:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()
    if name not in _policies:
        raise UnknownPolicy(f"there is no policy {name}: there are {', '.join(policy_names())}")
    return _policies[name]
