"""The worker's providers and log, tested in this process."""

from __future__ import annotations

import logging
import sys
import time
import types
from collections.abc import Iterator

import fake_ipex as fake_ipex_package
import pytest
import torch
from attention_oracle import attention_over_blocks, seeded
from hypothesis import given
from hypothesis import strategies as st

from cpu_worker import providers
from cpu_worker.logs import LimitedLog
from cpu_worker.providers import ProviderError
from cpu_worker.providers.torch import Kernel, attend, flash_attention, sum_values
from sglang_hybrid.ops import reference, reference_weights

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def assert_attends_like_softmax(
    dtype: torch.dtype, rows: int, heads: int, group: int, dim: int, listed: int, seed: int, kernel: Kernel
) -> None:
    random = seeded(seed)
    pages = 2 + listed
    keys, values = (torch.randn(pages, heads, 32, dim, generator=random).to(dtype) for _ in range(2))
    query = torch.randn(rows, heads, group, dim, generator=random).to(dtype)
    lists = torch.randint(0, pages, (rows, heads, listed), generator=random)
    count = torch.randint(0, listed + 1, (rows, heads), generator=random)
    last_fill = torch.randint(1, 33, (rows, heads), generator=random)

    out, lse = attend(query, keys, values, lists, count, last_fill, 0.2, kernel)

    blocks = [
        [
            [
                (int(lists[row, head, i]), 32 if i < count[row, head] - 1 else int(last_fill[row, head]))
                for i in range(int(count[row, head]))
            ]
            for head in range(heads)
        ]
        for row in range(rows)
    ]
    expected_out, expected_lse = attention_over_blocks(query, keys, values, blocks, 0.2)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.flatten(1, 2), expected_out.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.flatten(1, 2), expected_lse.float(), rtol=0, atol=1e-3)


@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(1, 4),
    heads=st.integers(1, 3),
    group=st.integers(1, 16),
    dim=st.sampled_from([64, 96, 128, 256]),
    listed=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_torch_attends_to_block_lists_like_softmax_attention(
    dtype: torch.dtype, rows: int, heads: int, group: int, dim: int, listed: int, seed: int
) -> None:
    assert_attends_like_softmax(dtype, rows, heads, group, dim, listed, seed, flash_attention)


@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    listed=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_torch_attends_to_tokens_whose_bit_is_set(
    dtype: torch.dtype, rows: int, heads: int, listed: int, seed: int
) -> None:
    random = seeded(seed)
    keys, values = (torch.randn(2 + listed, heads, 32, 64, generator=random).to(dtype) for _ in range(2))
    query = torch.randn(rows, heads, 3, 64, generator=random).to(dtype)
    lists = torch.randint(0, 2 + listed, (rows, heads, listed), generator=random)
    count = torch.randint(0, listed + 1, (rows, heads), generator=random)
    last_fill = torch.randint(1, 33, (rows, heads), generator=random)
    masks = torch.randint(-(2**31), 2**31, (rows, heads, listed), generator=random).to(torch.int32)
    masks[torch.rand(masks.shape, generator=random) < 0.3] = 0
    masks &= ~(1 << 9)
    place = torch.arange(listed)
    ids = torch.where(place < count[..., None], lists, reference.NO_BLOCK)
    fill = torch.where(place < count[..., None] - 1, 32, last_fill[..., None]) * (ids != reference.NO_BLOCK)
    expected = reference.attend_blocks(query.flatten(1, 2), keys, values, ids, fill, 0.2, masks=masks)

    keys[:, :, 9] = values[:, :, 9] = torch.nan
    out, lse = attend(query, keys, values, lists, count, last_fill, 0.2, masks=masks.long())
    torch.testing.assert_close(out.flatten(1, 2), expected[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.flatten(1, 2), expected[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_torch_sums_values_by_weights(dtype: torch.dtype) -> None:
    random = seeded(3)
    values = torch.randn(9, 2, 32, 64, generator=random).to(dtype)
    values[:, :, 4] = torch.nan
    pages = torch.randint(0, 9, (3, 2, 5), generator=random)
    count = torch.tensor([[5, 0], [1, 3], [0, 2]])
    weights = torch.randn(3, 2, 4, 5, 32, generator=random)
    weights[..., 4] = 0.0
    beyond = torch.arange(5) >= count[..., None]
    ids = pages.masked_fill(beyond, reference.NO_BLOCK)
    expected = reference_weights.sum_values(weights.masked_fill(beyond[:, :, None, :, None], 0.0), values, ids)
    weights.masked_fill_(beyond[:, :, None, :, None], torch.nan)  # as if left over from another post
    out, lse = sum_values(weights, values, pages, count)
    torch.testing.assert_close(out.flatten(1, 2), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(lse, torch.where(count > 0, 0.0, -torch.inf)[..., None].expand(3, 2, 4))


def test_equal_lists_are_computed_together_and_each_gets_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(query))
        return flash_attention(query, keys, values, scale)

    keys = torch.randn(9, 2, 32, 64, generator=seeded(0))
    query = torch.randn(4, 2, 3, 64, generator=seeded(1))
    lists = torch.arange(8).view(4, 2, 1) + 1
    one = torch.ones(4, 2, dtype=torch.long)
    together = attend(query, keys, keys, lists, one, one * 32, 1.0, counted)
    assert calls == [8]
    # so small that a chunk has one (row, KV head) pair per thread
    monkeypatch.setattr("cpu_worker.providers.torch._CHUNK_BYTES", 1)
    apart = attend(query, keys, keys, lists, one, one * 32, 1.0, counted)
    assert calls == [8] + [torch.get_num_threads()] * (8 // torch.get_num_threads())
    torch.testing.assert_close(apart, together)


# -- ipex --------------------------------------------------------------------------------------


@pytest.fixture
def fake_ipex() -> Iterator[None]:
    with fake_ipex_package.installed():
        yield


def test_ipex_attends_with_the_extensions_operator(fake_ipex: None) -> None:
    from cpu_worker.providers.ipex import IpexProvider

    provider = providers.create("ipex")
    assert isinstance(provider, IpexProvider) and provider.name == "ipex"
    assert_attends_like_softmax(torch.float32, 3, 2, 4, 64, 5, 0, provider.kernel())


@pytest.mark.parametrize("module", [None, types.ModuleType("without_operators")])
def test_without_the_extension_ipex_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", module)
    with pytest.raises(ProviderError, match="provider=native"):
        providers.create("ipex")


def test_an_extension_for_another_torch_is_named_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing IPEX 2.8.0 beside another torch would fail with AttributeError: module 'os' has no ..."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.13.100+cpu")
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail("it was imported"))
    with pytest.raises(ProviderError, match=r"needs torch 1\.13, and the worker's environment has"):
        providers.create("ipex")


# -- log ---------------------------------------------------------------------------------------


def test_mistakes_are_logged_once_a_second_with_the_number_of_those_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limited = LimitedLog(logging.getLogger("test"))
    for now in (100.0, 100.5, 100.9, 101.0, 102.5):
        limited.warning(f"at {now}")
    assert caplog.messages == ["at 100.0", "at 101.0 (and 2 more since the last message)", "at 102.5"]


def test_what_a_client_sends_cannot_break_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    LimitedLog(logging.getLogger("test")).warning("refused: \n\x1b[31mfake line\x00" + "x" * 10_000)
    assert "\n" not in caplog.messages[0] and "\x1b" not in caplog.messages[0]
    assert len(caplog.messages[0]) < 1000
