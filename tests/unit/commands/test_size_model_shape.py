"""Shapes and bytes of models, from config.json and from the headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from size_cases import LLAMA, MOE, write_safetensors_header

from sglang_hybrid.commands.size.errors import SizeError
from sglang_hybrid.commands.size.model_shape import read_model, shape_of


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 8_030_261_248),
        (MOE, 30_532_122_624),
        (
            {
                "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960,
                "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
            1_543_714_304,
        ),
    ],
    ids=["llama-3.1-8b", "qwen3-30b-a3b", "qwen2.5-1.5b"],
)  # fmt: skip
def test_parameters_by_arithmetic_are_those_that_the_models_have(config: dict[str, Any], parameters: int) -> None:
    assert shape_of(config, "model").weights.total == 2 * parameters


def test_weights_are_counted_in_the_files_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model(tmp_path).weights_from == "arithmetic from config.json"
    tensors = {
        "model.embed_tokens.weight": ("BF16", (100, 8)),
        "lm_head.weight": ("BF16", (100, 8)),
        "model.layers.0.mlp.experts.3.up_proj.weight": ("BF16", (4, 8)),
        "model.norm.weight": ("F32", (8,)),  # loaded in the model's dtype
    }
    write_safetensors_header(tmp_path / "model.safetensors", tensors)
    for path in (tmp_path, tmp_path / "config.json"):
        model = read_model(path)
        assert model.weights_from == "safetensors files"
        assert (model.weights.dense, model.weights.embedding, model.weights.experts) == (1600 + 16, 1600, 64)


def test_an_embedding_that_is_also_the_output_is_read_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
    write_safetensors_header(tmp_path / "model.safetensors", {"model.embed_tokens.weight": ("BF16", (100, 8))})
    weights = read_model(tmp_path).weights
    assert (weights.dense, weights.embedding) == (1600, 0)


def test_an_index_chooses_the_files_and_one_without_files_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors_header(tmp_path / "consolidated.safetensors", {"norm.weight": ("BF16", (999,))})
    assert read_model(tmp_path).weights_from == "arithmetic from config.json"
    write_safetensors_header(tmp_path / "a.safetensors", {"model.norm.weight": ("BF16", (8,))})
    assert read_model(tmp_path).weights.total == 16


@pytest.mark.parametrize(
    ("quantised", "shown", "least", "most"),
    [
        ({"quant_method": "fp8"}, "fp8, 8 bits", 0.50, 0.60),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq, 4 bits", 0.25, 0.40),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            "compressed-tensors, 8 bits", 0.50, 0.60,
        ),
    ],
)  # fmt: skip
def test_quantised_projections_take_fewer_bytes_and_the_method_is_named(
    quantised: dict[str, Any], shown: str, least: float, most: float
) -> None:
    whole, smaller = shape_of(LLAMA, "model"), shape_of(LLAMA | {"quantization_config": quantised}, "model")
    assert smaller.quantisation == shown
    assert least < smaller.weights.total / whole.weights.total < most


def test_a_method_of_quantisation_that_is_not_known_needs_the_files() -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "exotic"}}
    with pytest.raises(SizeError, match=r"quantised by exotic, .* fp8, awq, gptq"):
        shape_of(config, "model")
    stored = {"model.layers.0.mlp.up_proj.qweight": ("I32", 10), "model.layers.0.mlp.up_proj.scales": ("F32", 2)}
    assert shape_of(config, "model", stored).weights.total == 48


def test_a_large_batch_reads_all_experts_and_a_single_token_its_own() -> None:
    model = shape_of(MOE, "model")
    assert model.weights_read(1) == pytest.approx(model.weights.dense + model.weights.experts * 8 / 128)
    assert model.weights_read(1000) == pytest.approx(model.weights.dense + model.weights.experts)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_gpus_share_kv_heads_and_copy_them_where_there_are_too_few(ranks: int, heads: int) -> None:
    model = shape_of(LLAMA, "model")
    model.check_ranks(ranks)
    assert model.kv_shape(ranks).kv_heads == heads


def test_a_number_of_gpus_that_cannot_share_the_heads_is_answered_with_those_that_can() -> None:
    with pytest.raises(SizeError, match="32 query heads and 8 KV heads: take one of 1, 2, 4, 8, 16, 32"):
        shape_of(LLAMA, "model").check_ranks(3)


def test_an_architecture_that_is_not_known_is_answered_with_those_that_are() -> None:
    with pytest.raises(SizeError, match=r"GemmaForCausalLM: only LlamaForCausalLM, Mistral.*Qwen3Moe"):
        shape_of({"architectures": ["GemmaForCausalLM"]}, "model")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"architectures": ["LlamaForCausalLM"]}', "num_attention_heads=None: a whole number above 0"),
        ("[]", "no JSON object"),
        ("nothing", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_with_what_is_missing(
    tmp_path: Path, written: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(SizeError, match=said):
        read_model(tmp_path)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(SizeError, match=r"config\.json"):
            read_model(path)


def test_a_damaged_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"12345678nothing")
    with pytest.raises(SizeError, match=r"safetensors files in .* cannot be read"):
        read_model(tmp_path)


def test_float32_weights_are_served_as_float16() -> None:
    assert shape_of(LLAMA | {"torch_dtype": "float32"}, "model").dtype == "float16"
