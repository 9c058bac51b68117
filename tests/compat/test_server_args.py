"""Flags, defaults and refusals of sglang-hybrid on a command line that SGLang parses."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sglang_hybrid.config import ConfigError, config_from_environment
from sglang_hybrid.integration import rank_cores
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.memory.capacity import CapacityError
from sglang_hybrid.protocol.cores import Core

CONFIGS = Path(__file__).parents[2] / "configs" / "pd"
# Model configurations. Arguments are resolved or refused without weights.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "torch_dtype": "float32",
}
MLA = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path, LLAMA)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET", "SGLANG_HYBRID_LOAD_FILE"):
        monkeypatch.setenv(name, "")  # restored after the test, even if flags export the variable


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def resolve(model: Path, *flags: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    common = ("--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init")
    args = prepare_server_args([*common, "--attention-backend", "hybrid", *flags])
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def test_the_page_size_is_the_block_size_without_being_asked(model: Path) -> None:
    assert resolve(model).page_size == 32
    assert resolve(model, "--page-size", "32").page_size == 32


def test_the_example_of_a_decode_instance_resolves_and_backs_up_retracted_requests_itself(model: Path) -> None:
    args = resolve(model, "--config", str(CONFIGS / "decode.yaml"))
    assert (args.disaggregation_mode, args.page_size) == ("decode", 32)
    assert getattr(args, "disaggregation_decode_retraction_backup", "cpu_tensor") == "cpu_tensor"


@pytest.mark.parametrize("transfer", ["mooncake", "mooncake_tcp", "nixl", "fake"])
def test_a_decode_instance_receives_by_any_of_these(model: Path, transfer: str) -> None:
    args = resolve(model, "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", transfer)
    # SGLang replaces mooncake_tcp by mooncake
    assert transfer.startswith(args.disaggregation_transfer_backend)


def test_the_example_of_a_prefill_instance_is_a_stock_server_with_our_page_size(model: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    flags = (
        "--model-path",
        str(model),
        "--device",
        "cpu",
        "--skip-tokenizer-init",
        "--attention-backend",
        "torch_native",
    )
    args = prepare_server_args([*flags, "--config", str(CONFIGS / "prefill.yaml")])
    assert (args.disaggregation_mode, args.page_size) == ("prefill", 32)


DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pp-size", "2"], "drop --pp-size"),
        (["--speculative-algorithm", "NGRAM"], "drop --speculative-algorithm"),
        (["--kv-cache-dtype", "fp8_e5m2"], "use --kv-cache-dtype fp8_e4m3 or auto"),
        (["--kv-cache-dtype", "fp8_e4m3", *DECODE], "receives no quantised pages: use --kv-cache-dtype auto"),
        (["--kv-cache-dtype", "fp8_e4m3", "--device", "xpu"], "use --kv-cache-dtype bfloat16 on xpu"),
        (
            ["--kv-cache-dtype", "fp8_e4m3", "--device", "cuda", "--hybrid", "policy=hgca"],
            r"policy=hgca over an FP8 KV cache, which full, scout, scoutattention can have.*--kv-cache-dtype bfloat16",
        ),
        (["--enable-hierarchical-cache"], "drop --enable-hierarchical-cache"),
        (["--enable-dp-attention"], "drop --enable-dp-attention"),
        (["--attn-dp-size", "2"], "and --attn-dp-size"),
        (["--page-size", "16"], "use --page-size 32"),
        (["--enable-hisparse"], "drop --enable-hisparse"),
        (["--disaggregation-mode", "prefill"], "start it with another --attention-backend and --page-size 32"),
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mori"], "mooncake"),
        (["--prefill-attention-backend", "torch_native"], "drop --prefill-attention-backend"),
        (["--enable-lmcache"], "drop --enable-lmcache"),
        (["--enable-mixed-chunk"], "drop --enable-mixed-chunk"),
        (["--enable-flexkv"], "drop --enable-flexkv"),
        (["--radix-cache-backend", "flexkv"], "--radix-cache-backend"),
        (["--enable-unified-cache-external-linker"], "drop --enable-unified-cache-external-linker"),
        (["--attn-cp-size", "2"], "drop --attn-cp-size"),
        (["--kv-canary", "log"], "drop --kv-canary"),
        (["--enable-memory-saver"], "drop --enable-memory-saver"),
        (["--enable-torch-compile"], "drop --enable-torch-compile"),
        (["--dllm-algorithm", "LowConfidence"], "drop --dllm-algorithm"),
        (["--enable-mis"], "drop --enable-mis"),
        (["--enable-deterministic-inference"], "drop --enable-deterministic-inference"),
        (["--prefill-only-disable-kv-cache"], "drop --prefill-only-disable-kv-cache"),
        (["--enable-two-batch-overlap"], "drop --enable-two-batch-overlap"),
        (["--enable-pdmux"], "drop --enable-pdmux"),
        (["--enable-nvidia-megakernel"], "drop --enable-nvidia-megakernel"),
        (["--enable-amd-monokernel"], "--enable-amd-monokernel"),
        (["--enable-pd-role-switch", *DECODE], "drop --enable-pd-role-switch"),
        (["--disaggregation-enable-kv-checksum", *DECODE], "drop --disaggregation-enable-kv-checksum"),
        (["--enable-unified-memory"], "drop --enable-unified-memory"),
        (["--enable-page-major-kv-layout"], "drop --enable-page-major-kv-layout"),
        (["--dcp-size", "2"], "drop --dcp-size"),
        (["--disaggregation-decode-enable-radix-cache", *DECODE], "drop --disaggregation-decode-enable-radix-cache"),
        (
            ["--disaggregation-decode-enable-offload-kvcache", *DECODE],
            "drop --disaggregation-decode-enable-offload-kvcache",
        ),
        (["--disaggregation-decode-retraction-backup", "host_pool", *DECODE], "cpu_tensor or drop the flag"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_refused_with_what_to_change(model: Path, flags: list[str], sentence: str) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if flags[0] not in parser._option_string_actions:
        pytest.skip(f"this SGLang has no {flags[0]}")
    with pytest.raises(Refusal, match=sentence) as caught:
        resolve(model, *flags)
    assert "\n" not in str(caught.value)


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's GPU and AMX."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sglang.srt.utils.cpu_has_amx_support", lambda: False)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "w8a8_int8"])
def test_quantised_weights_are_refused_on_a_cpu_that_sglang_has_no_kernels_for(
    model: Path, plain_cpu: None, method: str
) -> None:
    with pytest.raises(Refusal, match=f"kernels for {method} weights need a GPU, or a CPU with AMX"):
        resolve(model, "--quantization", method)


def test_a_quantised_checkpoint_is_refused_there_too(tmp_path: Path, plain_cpu: None) -> None:
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    with pytest.raises(Refusal, match="kernels for gptq weights need a GPU"):
        resolve(write_model(tmp_path, LLAMA | {"quantization_config": quantised}))


@pytest.mark.parametrize(
    "flags", [("--enable-lora", "--lora-target-modules", "all", "--max-lora-rank", "8"), ("--lora-paths", "a=/nowhere")]
)
def test_adapters_are_refused_on_a_host_without_a_gpu(model: Path, plain_cpu: None, flags: tuple[str, ...]) -> None:
    with pytest.raises(Refusal, match="drop --enable-lora and --lora-paths"):
        resolve(model, *flags)


def test_ranks_of_a_cpu_host_share_its_cores_unless_the_user_divided_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang fails with an assertion if a host has more ranks than NUMA nodes and its cores are not divided."""
    ranks = 2 * (os.cpu_count() or 1)  # more ranks than any host has NUMA nodes
    monkeypatch.setenv(rank_cores.VARIABLE, "")
    resolve(model, "--dp-size", str(ranks), "--hybrid", "host_memory=64MiB")
    assert len(os.environ[rank_cores.VARIABLE].split("|")) == ranks
    monkeypatch.setenv(rank_cores.VARIABLE, "0|0")
    resolve(model, "--dp-size", str(ranks), "--hybrid", "host_memory=64MiB")
    assert os.environ[rank_cores.VARIABLE] == "0|0"


def test_ranks_get_cores_of_one_node_where_they_can() -> None:
    cores = [Core((number, number + 8), node=number // 4) for number in range(8)]
    assert rank_cores.divide(cores, 2) == ["0,1,2,3", "4,5,6,7"]
    assert rank_cores.divide(cores, 3) == ["0,1", "2,3,4", "5,6,7"]
    assert rank_cores.divide(cores[:2], 3) == ["0", "1", "0"]


def test_a_size_that_is_chosen_after_graphs_is_refused_on_a_decode_instance(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with pytest.raises(Refusal, match="unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        resolve(model, "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")


def test_what_a_model_wants_of_attention_is_not_left_out() -> None:
    """Ignoring attention sinks would give another distribution without an error."""
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend

    backend = HybridAttnBackend.__new__(HybridAttnBackend)
    forwards: list[Callable[..., object]] = [backend.forward_decode, backend.forward_extend]
    for forward in forwards:
        with pytest.raises(Refusal, match="wants sinks, which is not supported"):
            forward(None, None, None, None, None, sinks=torch.zeros(3), q_rope=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["hybrid", "torch_native"])
def test_embeddings_as_input_are_refused_where_they_would_end_the_server(dtype: torch.dtype, backend: str) -> None:
    from sglang_hybrid.integration.refusals import refuse_request

    manager = SimpleNamespace(
        server_args=SimpleNamespace(attention_backend=backend), model_config=SimpleNamespace(dtype=dtype)
    )
    refuse_request(manager, SimpleNamespace(input_embeds=None))
    refused = backend == "hybrid" and dtype is not torch.bfloat16
    expected = pytest.raises(Refusal, match="start the server with --dtype bfloat16") if refused else nullcontext()
    with expected:
        refuse_request(manager, SimpleNamespace(input_embeds=[[0.0]]))


def test_a_model_with_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"DeepseekV2ForCausalLM uses multi-head latent attention \(MLA\)"):
        resolve(write_model(tmp_path, MLA))


def test_layers_that_would_be_computed_wrongly_are_refused() -> None:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_hybrid.integration.refusals import refuse_model

    class ModelConfig:
        attention_arch = None
        is_hybrid_swa = False
        hf_config = type("HF", (), {"architectures": ["SomeModel"]})

    def model_with(**attention: Any) -> torch.nn.Module:
        return torch.nn.ModuleList([RadixAttention(4, 16, 0.25, num_kv_heads=2, layer_id=7, **attention)])

    def refuse(model: torch.nn.Module, config: Any, dtype: torch.dtype = torch.float32) -> None:
        refuse_model(model, config, dtype, "cpu", "scout")

    class SlidingWindowConfig(ModelConfig):
        is_hybrid_swa = True

    refuse(model_with(), ModelConfig)
    with pytest.raises(Refusal, match="SomeModel has sliding-window layers, which are not supported"):
        refuse(model_with(), SlidingWindowConfig)
    with pytest.raises(Refusal, match=r"SomeModel has sliding-window layers \(layer 7: 128 tokens\)"):
        refuse(model_with(sliding_window_size=128), ModelConfig)
    with pytest.raises(Refusal, match="SomeModel caps its attention logits"):
        refuse(model_with(logit_cap=50.0), ModelConfig)
    with pytest.raises(Refusal, match="not causal self-attention"):
        refuse(model_with(is_cross_attention=True), ModelConfig)
    with pytest.raises(Refusal, match="SomeModel has no attention layer"):
        refuse(torch.nn.ModuleList(), ModelConfig)
    with pytest.raises(Refusal, match=r"KV cache of float8_e5m2.*add --kv-cache-dtype fp8_e4m3 or bfloat16"):
        refuse(model_with(), ModelConfig, torch.float8_e5m2)


def test_a_checkpoint_may_ask_for_an_fp8_cache_but_not_with_what_cannot_read_it_nor_with_scaled_codebooks() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_hybrid.integration.refusals import refuse_model

    attention = RadixAttention(4, 16, 0.25, num_kv_heads=2, layer_id=0)
    model, fp8 = torch.nn.ModuleList([attention]), torch.float8_e4m3fn
    config: Any = SimpleNamespace(
        attention_arch=None, is_hybrid_swa=False, hf_config=SimpleNamespace(architectures=["SomeModel"])
    )
    refuse_model(model, config, fp8, "cpu", "hcattention")
    refuse_model(model, config, fp8, "cuda:0", "scout")
    with pytest.raises(Refusal, match=r"policy=infinigen over an FP8 KV cache.*--kv-cache-dtype bfloat16"):
        refuse_model(model, config, fp8, "cuda:0", "infinigen")
    attention.k_scale_float = 0.5
    refuse_model(model, config, fp8, "cpu", "scout")
    with pytest.raises(Refusal, match="SomeModel scales the keys of its FP8 KV cache"):
        refuse_model(model, config, fp8, "cpu", "hcattention")


def test_flags_override_the_file_and_reach_child_processes_through_the_environment(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text("budget_tokens: 4096\nrecent_blocks: 5\n")
    resolve(model, "--hybrid-config", str(file), "--hybrid", "budget_tokens=1024", "--hybrid", "policy=full")
    config = config_from_environment()
    assert (config.budget_tokens, config.recent_blocks, config.policy) == (1024, 5, "full")


def test_an_unknown_setting_stops_the_start_and_names_the_nearest(model: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean budget_tokens"):
        resolve(model, "--hybrid", "budget_token=1024")


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers_before_anything_is_loaded(model: Path) -> None:
    # 2 layers x 2 KV heads x 16 + 16 channels x 4 bytes
    with pytest.raises(CapacityError, match=r"host_memory=1MiB gives a pool of 0 tokens.*512 bytes"):
        resolve(model, "--dtype", "float32", "--hybrid", "host_memory=1MiB")
    everything = psutil.virtual_memory().total >> 20  # more than is available, because some is in use
    with pytest.raises(CapacityError, match=rf"host_memory={everything}MiB asks for .* GiB, but only .* GiB"):
        resolve(model, "--hybrid", f"host_memory={everything}MiB")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("host_memory=900TiB", r"this machine has only [0-9.]+ GiB of memory"),
        ("worker_threads=1024", r"must be auto, or 1"),
        ("worker_cores=0,65000", r"65000 cannot be used by this process"),
    ],
)
def test_settings_that_this_host_cannot_have_stop_the_start(model: Path, setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(model, "--hybrid", setting)


def test_settings_without_the_backend_are_refused(model: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    with pytest.raises(Refusal, match="--attention-backend hybrid: add it"):
        prepare_server_args(["--model-path", str(model), "--device", "cpu", "--hybrid", "policy=full"])


def test_other_backends_are_left_alone(model: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    flags = ["--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native", "--page-size", "1"]
    args = prepare_server_args([*flags, "--skip-tokenizer-init"])
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    assert args.page_size == 1
    assert args.attention_backend == "torch_native"
