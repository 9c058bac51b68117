"""bench/attended on a tiny random model: the plain model, the blocks that steps attend to, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.attended import __main__ as program
from bench.attended.attention import Slots, attend
from bench.attended.block_keys import approximate, coded, estimates
from bench.attended.calibrated import Calibrated, calibrate, read_text, write_text
from bench.attended.plain_model import PlainModel, Shape, UnknownModel, shape_of
from bench.attended.selection import Row, Rules, select
from bench.attended.steps import Answered, Simulated, VariantSteps, answered, full_attention, simulate
from bench.attended.table import by_length, show
from bench.attended.variants import VARIANTS, Variant, variants_of
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler.prompts_file import Header, write_prompts
from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.calibration_text import CalibrationText, without_tokenizer
from sglang_hybrid.policies.scout.tuning import FIRST_SHARE, FIRST_STEPS

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}  # fmt: skip
SMALL = HybridConfig(budget_tokens=256)  # 8 blocks, 4 of them candidates
PROMPT, MOST = 900, 20


def random_weights(shape: Shape, has_biases: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, std: float = 0.15) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * std

    hidden, inner = shape.hidden, 2 * shape.hidden
    widths = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(shape.vocabulary, hidden),
    }
    for layer in range(shape.layers):
        part = {
            "self_attn.o_proj.weight": normal(hidden, widths["q"]),
            "mlp.gate_proj.weight": normal(inner, hidden),
            "mlp.up_proj.weight": normal(inner, hidden),
            "mlp.down_proj.weight": normal(hidden, inner),
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
        }
        for name in "qkv":
            width = widths.get(name, widths["k"])
            part[f"self_attn.{name}_proj.weight"] = normal(width, hidden, std=0.15 if name == "v" else 0.3)  # peaks
            if has_biases:
                part[f"self_attn.{name}_proj.bias"] = normal(width)
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in part.items()}
    return weights


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> PlainModel:
    shape = shape_of(CONFIG)
    return PlainModel(shape, random_weights(shape), positions=1024)


def text() -> CalibrationText:
    found = without_tokenizer(256, hidden=64, longest=512)
    return dataclasses.replace(found, fit=found.fit[:6], special=(found.fit[-1][:20],))


@pytest.fixture(scope="module")
def calibrated(model: PlainModel) -> Calibrated:
    return calibrate(model, text(), SMALL)


@pytest.fixture(scope="module")
def rules(model: PlainModel) -> Rules:
    return Rules.of(SMALL, model.shape)


def tokens(count: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def row(model: PlainModel, calibrated: Calibrated, rules: Rules) -> Answered:
    return answered(model, calibrated, rules, tokens(PROMPT), MOST)


def kl(full: torch.Tensor, steps: Simulated) -> torch.Tensor:
    want, got = full.log_softmax(dim=-1), steps.logits.log_softmax(dim=-1)
    return (want.exp() * (want - got)).sum(dim=-1)


# -- the plain model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_biases", [True, False])
def test_single_steps_behind_a_prompt_give_the_logits_of_one_prefill(has_biases: bool) -> None:
    shape = shape_of(CONFIG)
    model = PlainModel(shape, random_weights(shape, has_biases), positions=64)
    prompt = tokens(40)
    whole, parts = model.new_cache(40), model.new_cache(40)
    expected = model.run(prompt, whole)
    model.run(prompt[:37], parts)
    for token in prompt[37:]:
        found = model.run([token], parts)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert parts.length == whole.length == 40


def test_steps_of_an_answer_all_at_once_choose_the_tokens_that_single_steps_chose(
    model: PlainModel, row: Answered
) -> None:
    assert row.steps == MOST - 1
    assert full_attention(model, row).argmax(dim=-1).tolist() == row.answer[1:]


def test_a_model_in_files_gives_the_logits_of_the_transformers_library(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {**CONFIG, "model_type": "qwen2", "intermediate_size": 128, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(random_weights(shape_of(config)), tmp_path / "model.safetensors", {"format": "pt"})
    model = PlainModel.load(tmp_path, 64, "cpu", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = tokens(50)
    expected = theirs(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(model.run(prompt, model.new_cache(50)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM: .* LlamaForCausalLM and Qwen2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rotation of type llama3"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"head_dim": 80}, "head_dim 80: .* multiple of 32"),
    ],
)
def test_a_model_that_computes_something_else_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownModel, match=said):
        shape_of({**CONFIG, **change})


def test_a_directory_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no config\.json"):
        PlainModel.load(tmp_path, 64, "cpu")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnknownModel, match="no weights"):
        PlainModel.load(tmp_path, 64, "cpu")


# -- keys and attention ------------------------------------------------------------------------------------------------


def test_approximated_keys_give_the_estimates_of_digests_and_sketches() -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(2, 200, 64, generator=generator)  # 6 whole blocks
    queries = torch.randn(3, 4, 64, generator=generator)
    channels = torch.stack([torch.randperm(64, generator=generator)[:32] for _ in range(2)])
    blocks = keys[:, :192].unflatten(1, (6, 32)).transpose(0, 1)
    digests = reference.compact_digest(reference.minmax_digest(blocks, torch.full((6,), 32)), channels)
    codes = reference.sketch_codes(blocks, digests, channels)
    digests, codes = (one[None].expand(3, *one.shape) for one in (digests, codes))
    expected = reference.sketch_logits(queries, digests, codes, channels, 0.125)
    torch.testing.assert_close(estimates(queries, approximate(keys, channels), 0.125), expected, atol=1e-3, rtol=1e-4)


def test_codes_of_8_bits_are_near_the_numbers_that_they_stand_for() -> None:
    numbers = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(3))
    steps = numbers.abs().amax(dim=1) / 127
    error = (coded(numbers, steps) - numbers).abs()
    assert error.max() > 0 and bool((error <= steps[:, None] * 0.6).all())


def test_codes_change_attention_only_where_tokens_are_in_slots() -> None:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(3, 4, 64, generator=generator)
    keys, values, other_keys, other_values = torch.randn(4, 2, 100, 64, generator=generator).unbind()
    everything = torch.ones(3, 2, 100, dtype=torch.bool)
    in_slots = everything.clone()
    in_slots[..., 40:] = False

    def attended(tokens: torch.Tensor, keys_in_slots: torch.Tensor, values_in_slots: torch.Tensor) -> torch.Tensor:
        slots = Slots(tokens, keys_in_slots, values_in_slots)
        return attend(queries, keys, values, everything, 0.125, slots=slots)

    plain = attend(queries, keys, values, everything, 0.125)
    torch.testing.assert_close(attended(~everything, other_keys, other_values), plain)
    mixed_keys = torch.cat((other_keys[:, :40], keys[:, 40:]), dim=1)
    mixed_values = torch.cat((other_values[:, :40], values[:, 40:]), dim=1)
    expected = attend(queries, mixed_keys, mixed_values, everything, 0.125)
    torch.testing.assert_close(attended(in_slots, other_keys, other_values), expected)
    assert not torch.allclose(expected, plain)


# -- selection ---------------------------------------------------------------------------------------------------------


def scores_of(blocks: Row, seed: int) -> torch.Tensor:
    logits = 12 * torch.randn(*blocks.age.shape, 2, 2, generator=torch.Generator().manual_seed(seed))
    logits = reference.without_tail(logits.permute(0, 2, 3, 1), blocks.counts)
    return reference.block_scores(logits, blocks.counts, 0.125)


def test_the_variant_served_has_the_settings_of_the_server(rules: Rules) -> None:
    settings, served = rules.settings, VARIANTS["served"]
    assert settings.whole is not None and settings.whole.steps == FIRST_STEPS
    assert served.first_share == FIRST_SHARE and settings.whole_score == math.log(FIRST_SHARE * rules.group)
    assert served.slot_codes == settings.has_codes


def test_a_first_step_has_the_best_blocks_of_the_step_before_and_reads_all_that_matter(rules: Rules) -> None:
    blocks = Row.of(PROMPT, 10, rules, torch.device("cpu"))
    real, predicted = scores_of(blocks, 1), scores_of(blocks, 2)
    found = select(blocks, real, predicted, 1, rules, first_share=0.01)
    before = torch.zeros_like(found.resident[0])
    for step in range(10):
        ranked = (real[step] + rules.settings.bonus[1] * before).masked_fill(~blocks.candidates[step], -torch.inf)
        best = torch.zeros_like(before).scatter_(1, ranked.topk(4, dim=1).indices, True)
        assert torch.equal(found.resident[step], best)
        enough = (real[step + 1] >= math.log(0.01 * 2)) & blocks.candidates[step + 1]
        assert torch.equal(found.attended[step], best | enough) and not (found.late[step] & best).any()
        likely = (predicted[step + 1] >= math.log(0.01 * 2)) & blocks.candidates[step + 1]
        assert torch.equal(found.expected[step], best | likely)
        before = best


def test_a_later_step_copies_selected_misses_to_slots_and_stays_within_the_budget(rules: Rules) -> None:
    blocks = Row.of(PROMPT, FIRST_STEPS + 6, rules, torch.device("cpu"))
    real, predicted = scores_of(blocks, 1), scores_of(blocks, 2)
    found = select(blocks, real, predicted, 1, rules, first_share=None)
    assert not found.late[:FIRST_STEPS].any()  # nothing is read beyond the selection
    late, resident = found.late[FIRST_STEPS:], found.resident[FIRST_STEPS:]
    assert late.any() and bool((resident >= late).all())
    assert resident.sum(dim=2).unique().tolist() == [4]
    assert bool((predicted[FIRST_STEPS + 1 :][late] >= rules.settings.min_miss_score[1]).all())


def test_a_selected_block_with_little_attention_is_no_miss(model: PlainModel, rules: Rules) -> None:
    strict = Rules.of(load_config(None, ["budget_tokens=256", "scout.min_miss_attention=0.1"]), model.shape)
    blocks = Row.of(PROMPT, FIRST_STEPS + 6, rules, torch.device("cpu"))
    real, predicted = scores_of(blocks, 1), scores_of(blocks, 2)
    few, many = (
        predicted[1:][select(blocks, real, predicted, 1, one, first_share=None).late] for one in (strict, rules)
    )
    assert 0 < len(few) < len(many) and few.min() >= math.log(0.1 * 2) > many.min()


def test_a_block_that_is_no_longer_recent_keeps_its_slot(rules: Rules) -> None:
    blocks = Row.of(32 * 20, 1, rules, torch.device("cpu"))  # the step opens block 20: block 17 is a candidate now
    scores = scores_of(blocks, 1)
    found = select(blocks, scores, scores, 0, rules, first_share=None)
    assert not blocks.candidates[0, 17] and blocks.candidates[1, 17]
    assert found.resident[0, :, 17].all() and found.resident[0].sum(dim=1).tolist() == [4, 4]


# -- variants ----------------------------------------------------------------------------------------------------------


def test_first_steps_that_leave_nothing_out_are_full_attention(
    model: PlainModel, calibrated: Calibrated, rules: Rules, row: Answered
) -> None:
    everything = Variant(first_share=0.0, slot_codes=False)
    found = kl(full_attention(model, row), simulate(model, calibrated, rules, row, everything))
    assert found[:FIRST_STEPS].abs().max() < 1e-5 < found[FIRST_STEPS:].max()


def test_a_lower_share_reads_more_blocks_and_comes_nearer_to_full_attention(
    model: PlainModel, calibrated: Calibrated, rules: Rules, row: Answered
) -> None:
    full = full_attention(model, row)
    shares = (None, 0.1, 0.03, 0.01)
    steps = [simulate(model, calibrated, rules, row, Variant(share, slot_codes=False)) for share in shares]
    late = [float(one.late[:FIRST_STEPS].mean()) for one in steps]
    distances = [float(kl(full, one)[:FIRST_STEPS].mean()) for one in steps]
    assert late[0] == 0 and late == sorted(late) and late[-1] > 1
    assert distances == sorted(distances, reverse=True) and distances[-1] < distances[0] / 2


@pytest.mark.parametrize(
    "variant",
    [Variant(0.02), Variant(0.02, bias="real", slot_codes=False), Variant(0.02, "real", 0.5, 0.5), VARIANTS["mean"]],
)
def test_a_layer_computes_what_the_reference_computes_over_slots_late_blocks_and_the_mean(
    model: PlainModel, calibrated: Calibrated, rules: Rules, row: Answered, variant: Variant
) -> None:
    steps = VariantSteps(model, calibrated, rules, row, variant)
    seen: list[tuple[torch.Tensor, ...]] = []

    def attended(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        out = steps.attend(layer, *tensors)
        seen.append((*tensors, out))
        return out

    model.forward(row.answer[:-1], row.length, attended)
    (inputs_before, *_), (_, query, keys, values, out) = seen[:2]
    prompt, scale, settings = row.layers[1], model.shape.scale, rules.settings
    blocks = Row.of(row.length, row.steps, rules, model.device)
    total, count = row.length + row.steps, blocks.age.shape[1]

    def pool(of_prompt: torch.Tensor, of_answer: torch.Tensor, step: torch.Tensor, has_codes: bool) -> torch.Tensor:
        numbers = torch.cat((of_prompt, of_answer.transpose(0, 1)), dim=1)
        numbers = coded(numbers, step) if has_codes else numbers
        padded = torch.nn.functional.pad(numbers, (0, 0, 0, 32 * count - total))
        return padded.reshape(len(padded), count, 32, -1).transpose(0, 1).contiguous()

    def pools(has_codes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys, of_values = calibrated.steps[1]
        return pool(prompt.keys, keys, of_keys, has_codes), pool(prompt.values, values, of_values, has_codes)

    channels = calibrated.channels[1]
    digests = reference.compact_digest(reference.minmax_digest(pools(False)[0], torch.full((count,), 32)), channels)
    codes = reference.sketch_codes(pools(False)[0], digests, channels)

    def estimated(queries: torch.Tensor) -> torch.Tensor:
        asked = torch.cat((prompt.last_query, queries))
        digests_of_rows, codes_of_rows = (one.expand(len(asked), *one.shape) for one in (digests, codes))
        logits = reference.sketch_logits(asked, digests_of_rows, codes_of_rows, channels, scale)
        return reference.without_tail(logits, blocks.counts)

    positions = row.length + torch.arange(row.steps)
    real, ahead = estimated(query), estimated(calibrated.predictors[1].query(inputs_before, positions))
    scores, scores_ahead = (reference.block_scores(one, blocks.counts, scale) for one in (real, ahead))
    found = select(blocks, scores, scores_ahead, 1, rules, variant.first_share)
    near, lengths = blocks.near[1:, None], positions + 1

    def side(mask: torch.Tensor, has_codes: bool, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.where(mask, torch.arange(count), reference.NO_BLOCK)
        fill = reference.block_fill(ids, lengths, 32)
        return reference.attend_blocks(query, *pools(has_codes), ids, fill, scale, bias)

    bias = None
    if variant.bias != "none":
        logits, told = (real, found.attended) if variant.bias == "real" else (ahead, found.expected)
        of_near = reference.near_bias(logits[1:], told, blocks.counts[1:], scale, settings.sink, settings.recent)
        bias = variant.bias_part * of_near[..., None] * near[:, :, None]
    late = found.late & ~found.resident
    assert late[:FIRST_STEPS].any()
    both = reference.merge(*side(found.resident | near, variant.slot_codes, bias), *side(late, False, None))
    if variant.mean_part:
        left = blocks.candidates[1:, None] & ~found.attended
        mass = (real[1:] * scale).masked_fill(~left[:, :, None], -torch.inf).logsumexp(dim=3).flatten(1)
        mean = prompt.values[:, 32:].float().mean(dim=1).repeat_interleave(rules.group, dim=0)
        both = reference.merge(*both, mean.expand_as(both[0]), mass + math.log(variant.mean_part))
    torch.testing.assert_close(out, both[0], atol=1e-4, rtol=1e-4)


def test_every_named_variant_runs_and_no_two_are_the_same(
    model: PlainModel, calibrated: Calibrated, rules: Rules, row: Answered
) -> None:
    found = [simulate(model, calibrated, rules, row, variant) for variant in VARIANTS.values()]
    assert all(one.logits.isfinite().all() and one.late.shape == (row.steps,) for one in found)
    assert len({float(one.logits.double().square().sum()) for one in found}) == len(VARIANTS)


def test_a_variant_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert list(variants_of("served,mean")) == ["served", "mean"]
    with pytest.raises(InputError, match=r"--variants means: there are served, .*selection-alone"):
        variants_of("served,means")


# -- the program -------------------------------------------------------------------------------------------------------


def prompt_of(task: str, count: int = PROMPT, length: int = 1024, new_tokens: int = 6) -> RetrievalPrompt:
    return RetrievalPrompt(f"ruler:{task}", tuple(tokens(count)), ("x",), length, None, new_tokens, "string_match_all")


def test_prompts_are_taken_from_all_tasks_in_turn() -> None:
    prompts = [prompt_of("vt"), prompt_of("vt"), prompt_of("vt"), prompt_of("fwe"), prompt_of("cwe")]
    found = program.chosen(prompts, "vt,fwe", samples=2)
    assert [one.task for one in found] == ["ruler:vt", "ruler:fwe", "ruler:vt"]
    with pytest.raises(InputError, match="--tasks qa: the prompts are of vt, fwe, cwe"):
        program.chosen(prompts, "vt,qa", None)


def test_prompts_within_the_budget_or_of_another_tokenizer_are_refused() -> None:
    program.check([prompt_of("vt")], text(), 256, 256)
    with pytest.raises(InputError, match="900 tokens: within the budget of 2048"):
        program.check([prompt_of("vt")], text(), 256, 2048)
    with pytest.raises(InputError, match=r"ruler:vt has token 2\d\d, and the model's vocabulary ends at 99"):
        program.check([prompt_of("vt")], CalibrationText((), ()), 100, 256)
    with pytest.raises(InputError, match="calibration text has token"):
        program.check([], text(), 100, 256)


def test_a_table_has_the_means_of_each_length_and_none_where_there_are_no_steps() -> None:
    def measured(task: str, kls: list[float], change: int | None) -> dict[str, Any]:
        told = {"kl": kls, "first_change": change, "late": [2.0] * len(kls)}
        return {"task": task, "length": 1024, "steps": len(kls), "variants": {"served": told}}

    prompts = [measured("vt", [1.0] * 4 + [3.0], 16), measured("fwe", [0.0] * 4 + [1.0], 2)]
    found = by_length([*prompts, {"task": "vt", "length": 1024, "steps": 0, "variants": {}}])["1024"]["served"]
    assert found["kl"] == {"1-4": 0.5, "5-16": 2.0, "later": None} and found["late"]["1-4"] == 2.0
    assert (found["prompts"], found["prompts_changed_in_first_steps"]) == (2, 1)
    assert found["kl_of_first_steps_by_task"] == {"fwe": 0.2, "vt": 1.4}
    assert "1 of 2" in show(prompts)


def test_calibration_text_is_the_same_after_it_was_in_a_file(tmp_path: Path) -> None:
    write_text(tmp_path / "text.json", text())
    assert read_text(tmp_path / "text.json") == text()


def test_a_run_writes_every_prompt_and_where_the_numbers_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(shape_of(CONFIG)), tmp_path / "model.safetensors")
    write_text(tmp_path / "text.json", text())
    write_prompts(tmp_path / "prompts", Header("", "", 0), [prompt_of("vt"), prompt_of("fwe")])
    flags = ["--model", str(tmp_path), "--text", str(tmp_path / "text.json"), "--prompts", str(tmp_path / "prompts")]
    flags += ["--out", str(tmp_path / "out.json"), "--variants", "served,mean", "--tasks", "vt"]
    with pytest.raises(SystemExit, match="within the budget"):
        program.main(flags)
    monkeypatch.setattr(program, "HybridConfig", lambda: SMALL)
    program.main(flags)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["planned"] == len(told["prompts"]) == 1 and "machine" in told["origin"]
    assert list(told["prompts"][0]["variants"]) == ["served", "mean"] == list(told["summary"]["1024"])
    assert len(told["prompts"][0]["variants"]["mean"]["kl"]) == told["prompts"][0]["steps"] == 5
    assert "1/1 ruler:vt" in capsys.readouterr().out
