"""Profiles as files load as they were saved, and files that do not fit or are damaged are refused with reasons."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_hybrid.policies.scout import profile as profile_module
from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile import (
    VERSION,
    Curve,
    HostRates,
    ModelIdentity,
    Profile,
    ProfileError,
    ProfileFacts,
    load_profile,
)

LAYERS, HIDDEN, WIDTH = 3, 12, 8
KEY = "sglang_hybrid_profile"

MODEL = ModelIdentity(
    architecture="LlamaForCausalLM",
    layers=LAYERS,
    hidden=HIDDEN,
    query_heads=4,
    kv_heads=2,
    head_dim=2,
    weights=[0.25, -1.5, 0.001, 3.0],
)
FACTS = ProfileFacts(
    model=MODEL,
    block_tokens=32,
    budget_tokens=2048,
    beta=0.12,
    intervals=[1, 8, 256],
    bonus=[0.0, 0.5, 4.0],
    miss_shares=[0.0064, 0.0016, 1.0],
    ranks=[0, HIDDEN, 3],
    cosine_raw=[1.0, 0.8, 0.7],
    cosine_calibrated=[1.0, 0.95, 0.9],
    block_change=[0.1, 0.2, 0.3],
    curves=[Curve(name="with recall", ratios=[[0.1, 0.2], [0.0, 0.0], [0.2, 0.4]])],
    rates=HostRates(cpu="some CPU", threads=4, read_gb_s=40.0, attention_gb_s=20.0, transfer_gb_s=None),
    notes={"command": "sglang-hybrid profile", "tokens": 1000, "texts": ["a", "ü"]},
)


def some_profile() -> Profile:
    """Return a profile with a full correction for one layer and a low-rank correction for another."""
    rows = torch.arange(100.0)
    full = Correction(rows[: WIDTH * HIDDEN].view(WIDTH, HIDDEN).half(), None, rows[:WIDTH].half())
    # a slice, as reduced-rank regression gives it: not contiguous
    thin = Correction(rows[: WIDTH * 5].view(WIDTH, 5)[:, :3], rows[: 3 * HIDDEN].view(3, HIDDEN), -rows[:WIDTH])
    return Profile(FACTS, {1: full, 2: thin})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model-2048.safetensors"


def refusal(path: Path) -> str:
    """Load a file that must be refused. Return the message after the name of the file."""
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert message.startswith(f"profile {path}: ")
    assert "\n" not in message
    return message.removeprefix(f"profile {path}: ")


# Saving and loading


def test_a_profile_comes_back_as_it_was_saved(path: Path) -> None:
    saved = some_profile()
    saved.save(path)
    loaded = load_profile(path)
    assert loaded.facts == FACTS
    assert loaded.bonus == (0.0, 0.5, 4.0)
    assert loaded.intervals == (1, 8, 256)
    assert loaded.miss_shares == (0.0064, 0.0016, 1.0)
    assert list(loaded.corrections) == [1, 2]
    for layer, correction in saved.corrections.items():
        for before, after in zip(vars(correction).values(), vars(loaded.corrections[layer]).values(), strict=True):
            assert (before is None) == (after is None)
            if before is not None:
                assert before.dtype == after.dtype
                assert torch.equal(before, after)


def test_steps_come_back_as_they_were_saved_and_other_facts_leave_them(path: Path) -> None:
    steps = {layer: torch.rand(2, MODEL.kv_heads, MODEL.head_dim) + 0.01 for layer in range(LAYERS)}
    saved = Profile(FACTS, {}, steps=steps).with_facts(beta=0.5)
    saved.save(path)
    loaded = load_profile(path)
    assert loaded.facts.beta == 0.5
    assert list(loaded.steps) == list(steps)
    assert all(torch.equal(loaded.steps[layer], of_layer) for layer, of_layer in steps.items())


def test_a_profile_that_is_older_than_its_steps_has_none(path: Path) -> None:
    some_profile().save(path)
    assert load_profile(path).steps == {}


def test_steps_that_do_not_fit_the_model_are_damage_of_their_layer(path: Path) -> None:
    save_raw(path, lambda _: None, {"layers.2.steps": torch.zeros(2, MODEL.kv_heads, MODEL.head_dim)})
    assert refusal(path).startswith("damaged: the steps of layer 2 must be positive and finite")


def test_a_profile_without_corrections_is_a_profile(path: Path) -> None:
    Profile(FACTS, {}).save(path)
    assert load_profile(path).corrections == {}


def test_saving_makes_the_directory_and_leaves_nothing_else_in_it(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "profiles" / "model.safetensors"
    some_profile().save(path)
    assert os.listdir(path.parent) == [path.name]


def test_a_mean_curve_is_over_layers() -> None:
    assert FACTS.curves[0].mean() == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("fails", ["writing", "renaming"])
def test_an_interrupted_save_leaves_the_profile_that_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    some_profile().save(path)
    before = path.read_bytes()

    def half_written(_tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    def not_renamed(*_: object) -> None:
        raise OSError("power cut")

    if fails == "writing":
        monkeypatch.setattr(profile_module, "save_file", half_written)
    else:
        monkeypatch.setattr(os, "replace", not_renamed)
    other = msgspec.structs.replace(FACTS, beta=0.5)
    with pytest.raises(OSError, match=r"disk full|power cut"):
        Profile(other, {}).save(path)
    assert path.read_bytes() == before
    assert load_profile(path).facts == FACTS


def test_saving_over_a_profile_replaces_it(path: Path) -> None:
    some_profile().save(path)
    Profile(msgspec.structs.replace(FACTS, beta=0.5), {}).save(path)
    assert load_profile(path).facts.beta == 0.5
    assert os.listdir(path.parent) == [path.name]


# Fitting the model that is served


def test_the_model_that_it_was_made_of_is_accepted() -> None:
    some_profile().check(MODEL, 32, 2048)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("architecture", "Qwen2ForCausalLM", "architecture: profile LlamaForCausalLM, served Qwen2ForCausalLM"),
        ("layers", 4, "layers: profile 3, served 4"),
        ("hidden", 24, "hidden: profile 12, served 24"),
        ("query_heads", 2, "query_heads: profile 4, served 2"),
        ("kv_heads", 1, "kv_heads: profile 2, served 1"),
        ("head_dim", 4, "head_dim: profile 2, served 4"),
        ("weights", [0.25, -1.5, 0.001, 3.2], "norms have 3.0000, served 3.2000"),
        ("weights", [0.25, 1.5, 0.001, 3.0], "norms have -1.5000, served 1.5000"),
        ("weights", [0.25, float("nan"), 0.001, 3.0], "norms have -1.5000, served nan"),
        ("weights", [0.25], "norms have 4 sampled gains, served 1"),
    ],
)
def test_another_model_is_refused_with_both_values(field: str, value: Any, shown: str) -> None:
    served = msgspec.structs.replace(MODEL, **{field: value})
    with pytest.raises(ProfileError) as caught:
        some_profile().check(served, 32, 2048)
    assert str(caught.value).startswith("made for something else: ")
    assert str(caught.value).endswith(shown)
    assert ";" not in str(caught.value), "nothing else differs"


def test_another_block_size_and_another_budget_are_refused_with_both_values() -> None:
    with pytest.raises(ProfileError, match=r"block_tokens: profile 32, served 16$"):
        some_profile().check(MODEL, 16, 2048)
    with pytest.raises(ProfileError, match=r"budget_tokens: profile 2048, served 1024$"):
        some_profile().check(MODEL, 32, 1024)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    served = msgspec.structs.replace(MODEL, layers=4, hidden=24)
    with pytest.raises(ProfileError) as caught:
        some_profile().check(served, 16, 1024)
    for part in ("layers: profile 3", "hidden: profile 12", "block_tokens: profile 32", "budget_tokens: profile 2048"):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_dtype_are_the_same_model(dtype: torch.dtype) -> None:
    rounded = torch.tensor(MODEL.weights).to(dtype).tolist()
    some_profile().check(msgspec.structs.replace(MODEL, weights=rounded), 32, 2048)


# Files that are not profiles


def test_a_missing_file_is_named_with_what_makes_one(path: Path) -> None:
    assert refusal(path) == "there is no such file; sglang-hybrid profile makes one"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path)


def test_the_safetensors_file_of_a_model_is_not_a_profile(path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(2)}, path, metadata=metadata)
        assert refusal(path) == "not a profile: a safetensors file without our metadata"


@pytest.mark.parametrize("content", [b"", b"beta: 0.12\n", b"\x00" * 64, b"\xff" * 64, b"PK\x03\x04 some archive"])
def test_other_files_cannot_be_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refusal(path).startswith("cannot be read: ")


def test_a_file_without_permission_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_profile().save(path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(profile_module, "safe_open", refused)  # simulated, because root may read everything
    assert refusal(path) == "cannot be read: [Errno 13] Permission denied"


def save_raw(
    path: Path, change: Callable[[dict[str, Any]], Any], tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Save a profile whose facts ``change`` has modified, as if by hand."""
    facts = json.loads(msgspec.json.encode(FACTS))
    change(facts)
    save_file(tensors or {}, path, metadata={KEY: json.dumps(facts)})


@pytest.mark.parametrize("version", [0, VERSION + 1, 99])
def test_another_version_is_refused_with_both_even_if_nothing_else_can_be_read(path: Path, version: int) -> None:
    def replace_everything(facts: dict[str, Any]) -> None:
        facts.clear()
        facts.update(version=version, other="things")

    save_raw(path, replace_everything)
    assert refusal(path) == f"has format version {version}, this release reads {VERSION}; make it anew"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda facts: facts.pop("version"), "version"),
        (lambda facts: facts.pop("intervals"), "intervals"),
        (lambda facts: facts.update(bonus="much"), "bonus"),
        (lambda facts: facts["model"].update(layers=None), "layers"),
        (lambda facts: facts["model"].update(colour="red"), "colour"),
        (lambda facts: facts.update(intervals=[1.5, 2, 3]), "intervals"),
    ],
)
def test_facts_of_another_form_cannot_be_read_and_name_the_field(
    path: Path, change: Callable[[dict[str, Any]], object], named: str
) -> None:
    save_raw(path, change)
    assert refusal(path).startswith("cannot be read: ")
    assert named in refusal(path)


def test_metadata_that_is_not_json_cannot_be_read(path: Path) -> None:
    save_file({}, path, metadata={KEY: "{'version': 1}"})
    assert refusal(path).startswith("cannot be read: ")


@pytest.mark.parametrize(
    "name", ["intervals", "bonus", "miss_shares", "ranks", "cosine_raw", "cosine_calibrated", "block_change"]
)
def test_a_list_that_is_not_one_value_per_layer_is_damage(path: Path, name: str) -> None:
    save_raw(path, lambda facts: facts[name].pop())
    assert refusal(path) == f"damaged: {name} must have one value for each of 3 layers"


def test_a_profile_that_is_older_than_its_least_shares_has_none(path: Path) -> None:
    save_raw(path, lambda facts: facts.pop("miss_shares"))
    assert load_profile(path).miss_shares == ()


LEFT, RIGHT, BIAS = (WIDTH, 3), (3, HIDDEN), (WIDTH,)


@pytest.mark.parametrize(
    "shapes",
    [
        {"left": (WIDTH, 3), "right": RIGHT},
        {"bias": BIAS},
        {"left": (WIDTH + 1, 3), "right": RIGHT, "bias": BIAS},
        {"left": LEFT, "right": RIGHT, "bias": (WIDTH + 1,)},
        {"left": LEFT, "right": RIGHT, "bias": (WIDTH, 1)},
        {"left": LEFT, "right": (4, HIDDEN), "bias": BIAS},
        {"left": LEFT, "right": (3, HIDDEN + 1), "bias": BIAS},
        {"left": LEFT, "right": (HIDDEN,), "bias": BIAS},
        {"left": LEFT, "right": (), "bias": BIAS},
        {"left": (WIDTH, HIDDEN + 1), "bias": BIAS},
        {"left": (WIDTH,), "bias": BIAS},
        {"left": (), "bias": BIAS},
        {"left": (WIDTH, 3, HIDDEN), "bias": BIAS},
        {"left": (WIDTH, HIDDEN, 1), "bias": BIAS},
    ],
    ids=str,
)
def test_matrices_that_do_not_fit_the_model_are_damage_of_their_layer(
    path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    save_raw(path, lambda _: None, {f"layers.2.{name}": torch.zeros(shape) for name, shape in shapes.items()})
    assert refusal(path).startswith("damaged: the matrices of layer 2 do not fit ")


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["cut", "flip", "noise"]))
def test_any_damage_is_either_harmless_or_refused_by_name(
    seed: int, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    choice = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    some_profile().save(path)
    content = bytearray(path.read_bytes())
    if kind == "cut":
        del content[choice.randrange(len(content)) :]
    elif kind == "flip":
        for _ in range(choice.randint(1, 8)):
            content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    else:
        content[choice.randrange(len(content))] = choice.randrange(256)
    path.write_bytes(content)
    try:
        loaded = load_profile(path)
    except ProfileError as error:
        assert str(error).startswith(f"profile {path}: ")
    else:
        # a changed number within the facts or a matrix cannot be detected
        assert len(loaded.intervals) == loaded.facts.model.layers


# Nothing in a profile runs


class Bomb:
    marker: ClassVar[Path]

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return (Path.touch, (Bomb.marker,))


def test_nothing_in_a_profile_is_executed(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    Bomb.marker = marker
    for content in (pickle.dumps(Bomb()), pickle.dumps({"state": Bomb()}, protocol=2)):
        path.write_bytes(content)
        assert refusal(path).startswith("cannot be read: ")
    torch.save({"state": Bomb()}, path)
    assert refusal(path).startswith("cannot be read: ")
    call = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    save_raw(path, lambda facts: facts.update(notes={"command": call, "!!python/object/apply": call}))
    assert load_profile(path).facts.notes["command"] == call
    assert not marker.exists()
