"""Codebooks of keys: clustering, the plan that is asked for, and refusals."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import seeded

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.profile.build_codebook import CodebookPlan, fit_codebooks
from sglang_hybrid.commands.profile.cluster_keys import (
    codebook_of,
    codebooks_to_fit,
    means_of_numbers,
    minibatch_kmeans,
)
from sglang_hybrid.commands.profile.main import parse
from sglang_hybrid.policies.scout.profile_facts import ModelIdentity

HEADS, DIM, LAYERS = 2, 8, 3
MODEL = ModelIdentity(
    architecture="LlamaForCausalLM",
    layers=LAYERS,
    hidden=32,
    query_heads=4,
    kv_heads=HEADS,
    head_dim=DIM,
    weights=[1.0],
)


def first_points(points: torch.Tensor, number: int) -> torch.Tensor:
    return points[:number].float()


def some_keys(tokens: int, kinds: int = 4) -> list[torch.Tensor]:
    """Return keys ``[KV heads, tokens, head_dim]`` of each layer: ``kinds`` different keys with a little noise."""
    random = seeded(0)
    centres = 5 * torch.randn(LAYERS, HEADS, kinds, DIM, generator=random)
    which = torch.arange(tokens) % kinds
    return list(centres[:, :, which] + 0.01 * torch.randn(LAYERS, HEADS, tokens, DIM, generator=random))


@pytest.mark.parametrize("shared", [False, True])
def test_each_group_is_clustered_alone_unless_groups_share(shared: bool) -> None:
    keys, seen = torch.randn(HEADS, 6, DIM, generator=seeded(1)), []

    def cluster(points: torch.Tensor, number: int) -> torch.Tensor:
        seen.append(points)
        return first_points(points, number)

    calls: list[None] = []
    tables = codebook_of(keys, 4, 3, shared=shared, cluster=cluster, done=lambda: calls.append(None))
    assert tables.shape == (HEADS, 1 if shared else 4, 3, 2)
    assert len(calls) == codebooks_to_fit(HEADS, 4, shared=shared) == (HEADS if shared else 4 * HEADS)
    if shared:
        parts = {tuple(part) for part in keys[1].unflatten(1, (4, 2)).flatten(0, 1).tolist()}
        assert {tuple(part) for part in seen[1].tolist()} == parts
    else:
        assert torch.equal(seen[5], keys[1, :, 2:4])  # the second head's second group


def test_codebooks_say_what_they_are_of_and_how_far_off_unseen_keys_are() -> None:
    keys = some_keys(40)
    plan = CodebookPlan(groups=4, centroids=4, shared=False)
    unseen = [of_layer[:, 30:] for of_layer in keys]
    made = fit_codebooks(MODEL, plan, keys, unseen, {"tokens": 40}, first_points, lambda: None)
    facts = made.codebooks.facts
    assert (facts.groups, facts.centroids, facts.shared, facts.model) == (4, 4, False, MODEL)
    assert len(made.errors) == LAYERS and all(0 < error < 1e-4 for error in made.errors)
    coarse = fit_codebooks(MODEL, CodebookPlan(4, 2, False), keys, unseen, {}, first_points, lambda: None)
    assert min(coarse.errors) > 0.05
    assert "4 bytes of each key of a KV head, 12.5 % of a 16-bit KV cache" in made.lines()[1]


def test_scikit_learn_finds_the_kinds_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(sys.prefix) / "apart")  # installed apart: requirements/apart.txt
    pytest.importorskip("sklearn")
    keys = some_keys(400)
    plan = CodebookPlan(groups=2, centroids=4, shared=False)
    made = fit_codebooks(MODEL, plan, keys, keys, {}, minibatch_kmeans(), lambda: None)
    assert max(made.errors) < 0.01


@pytest.mark.parametrize("number", [1, 2, 5, 64, 300])
def test_centroids_of_numbers_are_the_means_of_what_is_nearest_to_them(number: int) -> None:
    points = torch.cat((torch.randn(300, generator=seeded(2)), torch.full((50,), 2.5), torch.tensor([40.0])))
    found = means_of_numbers(points, number)
    assert found.shape == (number,) and torch.equal(found, found.sort().values)
    nearest = (points[:, None] - found).abs().argmin(dim=1)
    for centroid in nearest.unique().tolist():
        mine = points[nearest == centroid]
        assert abs(float(mine.mean() - found[centroid])) < 1e-4
    error = (points - found[nearest]).square().sum() / (points - points.mean()).square().sum()
    assert float(error) < (1.01 if number == 1 else 2 / number)


def test_without_scikit_learn_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'sglang-hybrid\[codebook\]'"):
        minibatch_kmeans()


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (CodebookPlan(3, 16, False), "--groups 3: 8 channels"),
        (CodebookPlan(16, 16, False), "--groups 16: 8 channels"),
        (CodebookPlan(4, 1, False), "--centroids 1: must be from 2 to 8192"),
        (CodebookPlan(4, 9000, False), "--centroids 9000: must"),
        (CodebookPlan(4, 101, False), "100 keys are too few for 101 centroids"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan: CodebookPlan, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        plan.check(head_dim=DIM, samples=100)
    CodebookPlan(4, 400, True).check(head_dim=DIM, samples=100)


def test_a_command_without_the_flag_makes_a_profile() -> None:
    assert parse([]).codebook is None
    options = parse(["--codebook", "out", "--groups", "32", "--shared"])
    assert (str(options.codebook), options.groups, options.centroids, options.shared) == ("out", 32, 256, True)
