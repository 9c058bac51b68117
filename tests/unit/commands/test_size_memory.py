"""The number of requests that fit: it equals a real server's; what limits it, and what doubles it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from size_cases import sizing

from sglang_hybrid import container, env
from sglang_hybrid.commands.size.errors import SizeError
from sglang_hybrid.commands.size.memory import GPU, HOST, Sizing
from sglang_hybrid.commands.size.quantities import GB, bytes_of, format_bytes, tokens_of
from sglang_hybrid.integration import pools, slot_dtype
from sglang_hybrid.memory.capacity import CapacityError


def tokens_of_server(sized: Sizing, requests: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the pool tokens of a server for ``requests`` running requests, by the server's code on a fake machine."""
    machine, model = sized.machine, sized.model
    monkeypatch.setattr(pools, "refuse_model", lambda *_: None)
    monkeypatch.setattr(slot_dtype, "_can_be_calibrated", lambda *_: True)
    monkeypatch.setattr(pools, "config_from_environment", lambda: sized.config)
    monkeypatch.setattr(container, "memory", lambda: SimpleNamespace(available=machine.host_bytes))
    monkeypatch.setenv(env.MEMORY_AT_START.name, str(machine.host_bytes))
    arguments = SimpleNamespace(
        attention_backend="hybrid", tp_size=machine.gpus, pp_size=1, nnodes=1, dp_size=1, enable_dp_attention=False,
        max_running_requests=requests, disaggregation_mode="null", disable_cuda_graph=False,
    )  # fmt: skip
    shape = sized.shape
    configurator = SimpleNamespace(
        server_args=arguments, model=None, device="cuda", kv_cache_dtype=torch.bfloat16,
        model_config=SimpleNamespace(
            num_hidden_layers=model.layers, get_num_kv_heads=lambda _tp: shape.kv_heads, head_dim=model.head_dim,
            get_num_attention_heads=lambda _tp: shape.kv_heads * shape.group, v_head_dim=model.head_dim,
            context_len=sized.tokens,
        ),
    )  # fmt: skip
    given = pools.available_bytes(lambda *_: sized.gpu_left(), configurator, machine.gpu_bytes)
    return given // shape.bytes_per_token


@pytest.mark.parametrize(
    ("sized", "limit"),
    [
        (sizing(gpu_gb=24, host_gb=512), GPU),
        (sizing(gpu_gb=80, host_gb=128), HOST),
        (sizing(gpu_gb=24, host_gb=256, gpus=2), HOST),
        (sizing("budget_tokens=1024", "sketch_channels=0", gpu_gb=24, host_gb=1024), GPU),
    ],
    ids=["gpu", "host", "two-gpus", "settings"],
)
def test_a_server_with_these_requests_has_tokens_for_all_of_them_and_not_for_one_more(
    sized: Sizing, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = sized.hybrid()
    assert fits.limited_by == limit and fits.count > 1
    assert tokens_of_server(sized, fits.count, monkeypatch) >= fits.count * sized.padded_tokens
    more = fits.count + 1
    assert tokens_of_server(sized, more, monkeypatch) < more * sized.padded_tokens


def test_stock_holds_whole_requests_in_what_the_weights_leave() -> None:
    sized = sizing(gpu_gb=24)
    stock, left = sized.stock(), int(24 * GB * 0.85) - sized.weights_per_gpu
    assert stock.limited_by == GPU
    assert stock.count * sized.kv_bytes <= left < (stock.count + 1) * sized.kv_bytes


def test_hybrid_runs_more_long_requests_than_stock() -> None:
    sized = sizing(gpu_gb=48, host_gb=1024)
    assert sized.hybrid().count > 4 * sized.stock().count > 0


@pytest.mark.parametrize(("gpu_gb", "host_gb"), [(24, 512), (80, 128), (24, 64), (16, 512)])
def test_the_purchase_doubles_requests_and_a_gigabyte_less_does_not(gpu_gb: int, host_gb: int) -> None:
    sized = sizing(gpu_gb=gpu_gb, host_gb=host_gb)
    for wanted, count in (
        (sized.double_stock(), lambda one: one.stock().count),
        (sized.double_hybrid(), lambda one: one.hybrid().count),
    ):
        more_gpu, more_host = wanted.gpu_bytes // GB, wanted.host_bytes // GB
        assert wanted.requests == max(1, 2 * count(sized)) and more_gpu + more_host > 0
        assert count(sizing(gpu_gb=gpu_gb + more_gpu, host_gb=host_gb + more_host)) >= wanted.requests
        if more_gpu:
            less = sizing(gpu_gb=gpu_gb + more_gpu - 1, host_gb=host_gb + more_host)
            assert count(less) < wanted.requests
        if more_host:
            less = sizing(gpu_gb=gpu_gb + more_gpu, host_gb=host_gb + more_host - 1)
            assert count(less) < wanted.requests


def test_a_pool_of_fixed_size_grows_with_the_memory_that_is_bought() -> None:
    fixed, share = (sizing(f"host_memory={size}", gpu_gb=80).double_hybrid() for size in ("64GB", "50%"))
    assert fixed == share and fixed.host_bytes > 0


def test_weights_that_do_not_fit_leave_no_requests_but_an_answer_what_would() -> None:
    sized = sizing(gpu_gb=16)
    assert sized.stock().count == sized.hybrid().count == 0
    assert sized.double_hybrid().requests == 1 and sized.double_hybrid().gpu_bytes > 0


def test_host_memory_that_a_server_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(CapacityError, match="less than one budget of 2048"):
        sizing("host_memory=100MiB").hybrid()
    with pytest.raises(CapacityError, match=r"only .* of host memory are available"):
        sizing("host_memory=1TB").hybrid()


def test_what_the_cuda_engine_does_not_serve_is_refused_with_what_it_does() -> None:
    with pytest.raises(SizeError, match=r"hgca.window_ratio=0.5 .* take policy scout or full"):
        sizing("policy=hgca", "hgca.window_ratio=0.5")
    with pytest.raises(SizeError, match=r"head_dim 80 .* head_dim 64 or 128"):
        sizing(head_dim=80)


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * GB), ("80GiB", 80 << 30), ("1.5TB", 1500 * GB), ("512 mib", 512 << 20)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["24", "0GB", "-1GB", "24 gigabytes", ""])
def test_what_is_no_size_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(SizeError, match="such as 24GB, 80GiB"):
        bytes_of(text)


def test_tokens_may_be_counted_in_1024s() -> None:
    assert (tokens_of("32k"), tokens_of("4000")) == (32768, 4000)
    for text in ("0", "1.5k", "many", "32m"):
        with pytest.raises(SizeError, match="such as 4000 or 32k"):
            tokens_of(text)


def test_bytes_are_shown_in_the_unit_that_suits_them() -> None:
    shown = [format_bytes(size) for size in (22_000_000, 5_500_000_000, 1_500_000_000_000, 500)]
    assert shown == ["22.0 MB", "5.5 GB", "1.5 TB", "0.5 kB"]
