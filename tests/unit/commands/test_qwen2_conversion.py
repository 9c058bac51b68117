"""Conversion of a Qwen2 GGUF to a Hugging Face directory: biases, order of rows, output projection, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny_gguf
from tiny_gguf import CONTROL, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, UNUSED, USER_DEFINED, tiny_tensors

from sglang_hybrid.commands import model_files
from sglang_hybrid.commands.model import DefaultModelError, prepare_gguf

pytest.importorskip("gguf")

MORE_TOKENS = {"<|fim_prefix|>": CONTROL, "<tool_call>": USER_DEFINED, "[PAD0]": UNUSED, "[PAD1]": UNUSED}
ROWS = len(tiny_gguf.tiny_vocabulary()) + len(MORE_TOKENS)


def qwen2_tensors() -> tiny_gguf.Tensors:
    return tiny_tensors(ROWS, biases=True, own_head=True)


def write_qwen2(path: Path, tensors: tiny_gguf.Tensors | None = None, **options: Any) -> Path:
    return tiny_gguf.write_tiny_gguf(
        path, tensors or qwen2_tensors(), "qwen2", text_split="qwen2", more_tokens=MORE_TOKENS, **options
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    return prepare_gguf(write_qwen2(folder / "tiny.gguf"), folder / "hf")


def as_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def weights_of(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights by name in float32. The file is parsed here: safetensors refuses bfloat16 in numpy."""
    content = (directory / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert begin % 8 == 0
    found = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        first, last = entry["data_offsets"]
        bits = np.frombuffer(content[begin + first : begin + last], np.uint16)
        found[name] = as_float32(bits).reshape(entry["shape"])
    return found


def test_every_tensor_arrives_under_its_hugging_face_name_in_bfloat16(converted: Path) -> None:
    source, found = qwen2_tensors(), weights_of(converted)
    assert len(found) == len(source)
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.q_proj.bias": "blk.1.attn_q.bias",
        "model.layers.0.self_attn.k_proj.bias": "blk.0.attn_k.bias",
        "model.layers.0.self_attn.v_proj.bias": "blk.0.attn_v.bias",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for name, original in pairs.items():
        # bfloat16 has 8 significant bits
        np.testing.assert_allclose(found[name], source[original], rtol=2**-8)


def test_rows_of_q_and_k_stay_where_they_are(converted: Path) -> None:
    source, found = qwen2_tensors(), weights_of(converted)
    for part in ("q", "k"):
        original = source[f"blk.0.attn_{part}.weight"]
        np.testing.assert_allclose(found[f"model.layers.0.self_attn.{part}_proj.weight"], original, rtol=2**-8)


def test_embedding_and_output_projection_are_kept_apart(converted: Path) -> None:
    source, found = qwen2_tensors(), weights_of(converted)
    np.testing.assert_allclose(found["lm_head.weight"], source["output.weight"], rtol=2**-8)
    assert not np.array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert json.loads((converted / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_file_without_an_output_projection_ties_it_to_the_embedding(tmp_path: Path) -> None:
    path = write_qwen2(tmp_path / "tied.gguf", tiny_tensors(ROWS, biases=True))
    directory = prepare_gguf(path, tmp_path / "hf")
    assert "lm_head.weight" not in weights_of(directory)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_tensor_of_several_pieces_is_the_same_as_one_of_one_piece(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_hybrid.commands.model.gguf_weights._PIECE_WEIGHTS", 3 * HIDDEN)
    again = prepare_gguf(write_qwen2(tmp_path / "tiny.gguf"), tmp_path / "hf")
    assert (again / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even() -> None:
    from sglang_hybrid.commands.model.gguf_weights import to_bfloat16

    step = 2.0**-7  # distance of neighbouring bfloat16 numbers above 1
    values = np.array([1, 1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - 0.49 * step, 0], np.float32)
    expected = np.array([1, 1, 1 + 2 * step, 1 + step, -1, 0], np.float32)
    np.testing.assert_array_equal(as_float32(to_bfloat16(values)), expected)


def test_config_says_what_the_gguf_says(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": tiny_gguf.CONTEXT, "rms_norm_eps": tiny_gguf.RMS_EPSILON,
        "rope_theta": tiny_gguf.ROPE_THETA, "vocab_size": ROWS, "use_sliding_window": False, "sliding_window": None,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16", "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert config["transformers_version"]  # else transformers takes a large tokenizer for a broken one of Mistral
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}


def test_checks_before_a_start_read_the_converted_directory(converted: Path) -> None:
    config = model_files.read_config(str(converted))
    assert config is not None
    assert model_files.context_tokens(config) == tiny_gguf.CONTEXT
    assert model_files.identity(config) == {
        "architecture": "Qwen2ForCausalLM", "layers": LAYERS, "hidden": HIDDEN, "query_heads": HEADS,
        "kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip


def test_the_tokenizer_cuts_text_as_qwen2_does(converted: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))

    def words(text: str) -> list[str]:
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    assert words("It'S 42") == ["It", "'S", "Ġ", "4", "2"]
    assert words("a  b(c);\n\n  d") == ["a", "Ġ", "Ġb", "(c", ");ĊĊ", "Ġ", "Ġd"]
    assert tokenizer.encode("he<|fim_prefix|><tool_call>").tokens == ["he", "<|fim_prefix|>", "<tool_call>"]
    for text in ["naïve 日本語 🙂 1234", "def f(x):\n\treturn x  # 10\n\n\n", "<tool_call> x"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids  # the same character in two encodings
    # only control tokens are skipped, and entries that pad the table are no tokens
    assert tokenizer.decode(tokenizer.encode("<tool_call>he<|im_end|>").ids) == "<tool_call>he"
    assert tokenizer.get_vocab_size() == ROWS - 2
    assert tokenizer.token_to_id("[PAD0]") is None


def test_the_chat_template_comes_out_of_the_gguf(converted: Path) -> None:
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["chat_template"] == tiny_gguf.CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    )  # fmt: skip
    assert config["model_max_length"] == tiny_gguf.CONTEXT


def test_transformers_loads_the_tokenizer_and_the_chat_template(converted: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    assert tokenizer.decode(tokenizer("he said 42<|im_end|>").input_ids) == "he said 42<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he<|im_end|>"


def test_a_layer_without_its_biases_is_refused(tmp_path: Path) -> None:
    tensors = {name: weights for name, weights in qwen2_tensors().items() if name != "blk.1.attn_v.bias"}
    with pytest.raises(DefaultModelError, match="has 23 layer tensors, its fields promise 24"):
        prepare_gguf(write_qwen2(tmp_path / "tiny.gguf", tensors), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_tensor_that_qwen2_does_not_have_is_refused(tmp_path: Path) -> None:
    tensors = qwen2_tensors() | {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    with pytest.raises(DefaultModelError, match=r"'blk\.0\.attn_q_norm\.weight' that a plain Qwen2 does not have"):
        prepare_gguf(write_qwen2(tmp_path / "tiny.gguf", tensors), tmp_path / "hf")


def test_logits_are_those_of_the_model_that_the_gguf_was_made_from(converted: Path) -> None:
    """The original is a transformers model into which the test copies the GGUF's tensors."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=ROWS, hidden_size=HIDDEN, intermediate_size=tiny_gguf.FEED_FORWARD, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=tiny_gguf.CONTEXT,
        rope_theta=tiny_gguf.ROPE_THETA, rms_norm_eps=tiny_gguf.RMS_EPSILON, tie_word_embeddings=False,
    )  # fmt: skip
    original = transformers.Qwen2ForCausalLM(config).float().eval()
    tensors = {name: torch.from_numpy(w).bfloat16().float() for name, w in qwen2_tensors().items()}
    with torch.no_grad():
        original.lm_head.weight.copy_(tensors["output.weight"])
        original.model.embed_tokens.weight.copy_(tensors["token_embd.weight"])
        original.model.norm.weight.copy_(tensors["output_norm.weight"])
        for number, layer in enumerate(original.model.layers):
            attention, own = layer.self_attn, f"blk.{number}."
            for part, module in (
                ("attn_norm", layer.input_layernorm), ("ffn_norm", layer.post_attention_layernorm),
                ("attn_q", attention.q_proj), ("attn_k", attention.k_proj), ("attn_v", attention.v_proj),
                ("attn_output", attention.o_proj), ("ffn_gate", layer.mlp.gate_proj), ("ffn_up", layer.mlp.up_proj),
                ("ffn_down", layer.mlp.down_proj),
            ):  # fmt: skip
                module.weight.copy_(tensors[f"{own}{part}.weight"])
                if getattr(module, "bias", None) is not None:
                    module.bias.copy_(tensors[f"{own}{part}.bias"])
        loaded = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype="float32")
        ids = torch.arange(40).unsqueeze(0) * 7 % ROWS
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits)
