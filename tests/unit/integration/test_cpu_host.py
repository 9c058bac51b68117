"""The stand-in for SGLang's compiled kernels on hosts without a GPU."""

import importlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from attention_oracle import seeded
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.integration.cpu_host import kernel_stand_in

Spans: TypeAlias = tuple[list[int], list[int], list[int]]  # rows, first token of each span, last token of each span + 1
SEEDS = st.integers(0, 2**32 - 1)


# Slots of requests


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """Draw distinct rows in any order, and one span of tokens in each row; some spans are empty."""
    rows = draw(st.lists(st.integers(0, 7), max_size=5, unique=True))
    edges = [sorted((draw(st.integers(0, 20)), draw(st.integers(0, 20)))) for _ in rows]
    return rows, [first for first, _ in edges], [last for _, last in edges]


def as_tensors(*lists: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(numbers, dtype=torch.int64) for numbers in lists]


@given(spans(), SEEDS)
def test_new_slots_are_written_to_each_rows_span_and_nowhere_else(case: Spans, seed: int) -> None:
    rows, first, last = case
    before = torch.randint(0, 1000, (8, 20), dtype=torch.int32, generator=seeded(seed))
    slots = list(range(5000, 5000 + sum(last) - sum(first)))
    expected, left = before.tolist(), iter(slots)
    for row, begin, end in zip(rows, first, last, strict=True):
        for position in range(begin, end):
            expected[row][position] = next(left)

    requests = before.clone()
    row_ids, starts, ends, new_slots = as_tensors(rows, first, last, slots)
    kernel_stand_in.assign_req_to_token_pool_cpu(row_ids, requests, starts, ends, new_slots, requests.shape[1])
    assert requests.dtype == torch.int32
    assert requests.tolist() == expected


@given(spans(), SEEDS, st.sampled_from([torch.int32, torch.int64]), st.integers(0, 3))
def test_slots_of_each_rows_span_are_collected_one_row_after_the_other(
    case: Spans, seed: int, dtype: torch.dtype, spare: int
) -> None:
    rows, first, last = case
    requests = torch.randint(0, 1000, (8, 20), dtype=torch.int32, generator=seeded(seed))
    content = requests.tolist()
    expected = [slot for row, begin, end in zip(*case, strict=True) for slot in content[row][begin:end]]

    slots = torch.full((len(expected) + spare,), -7, dtype=dtype)
    row_ids, starts, ends = as_tensors(rows, first, last)
    kernel_stand_in.assign_extend_cache_locs_cpu(row_ids, requests, starts, ends, slots, requests.shape[1])
    assert slots.tolist() == expected + [-7] * spare
    assert requests.tolist() == content


# Seeded sampling


def murmur3_x86_32(key: bytes) -> int:
    """Return MurmurHash3 with seed 0, as Austin Appleby published it, of a key whose length is a multiple of 4."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) % 2**32

    h = 0
    for (word,) in struct.iter_unpack("<I", key):
        h ^= rotate(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        h = (rotate(h, 13) * 5 + 0xE6546B64) % 2**32
    h ^= len(key)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_the_murmur_oracle_knows_published_values() -> None:
    assert murmur3_x86_32(b"") == 0
    assert murmur3_x86_32(b"test") == 0xBA6BD213
    assert murmur3_x86_32(bytes(4)) == 0x2362F9DE


WORDS = st.one_of(st.sampled_from([0, 1, 2**31 - 1]), st.integers(0, 2**31 - 1))
SAMPLING_SEEDS = st.one_of(st.sampled_from([0, -1, 2**32, 2**63 - 1, -(2**63)]), st.integers(-(2**63), 2**63 - 1))


@given(
    st.lists(st.tuples(SAMPLING_SEEDS, WORDS), min_size=1, max_size=4),
    st.lists(WORDS, min_size=1, max_size=8),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_murmur_hash_is_that_of_the_16_byte_key_seed_position_column(
    rows: list[tuple[int, int]], columns: list[int], dtype: torch.dtype
) -> None:
    hashes = kernel_stand_in.murmur_hash32(
        torch.tensor([seed for seed, _ in rows]),
        torch.tensor([position for _, position in rows], dtype=dtype),
        torch.tensor(columns, dtype=dtype),
    )
    assert hashes.dtype == torch.uint32
    expected = [[murmur3_x86_32(struct.pack("<qII", *row, column)) for column in columns] for row in rows]
    assert hashes.tolist() == expected


def test_sglang_finds_the_hash_among_torchs_operators() -> None:
    seed, position, columns = torch.tensor([5]), torch.tensor([6]), torch.arange(3)
    found = torch.ops.sgl_kernel.murmur_hash32_cpu.default(seed, position, columns)
    assert torch.equal(found, kernel_stand_in.murmur_hash32(seed, position, columns))


# Kernels that the stand-in lacks


def test_any_other_kernel_can_be_imported_and_says_so_when_it_is_called() -> None:
    from sglang_hybrid.integration.cpu_host.kernel_stand_in import moe_align_block_size, rmsnorm

    for name, kernel in {"moe_align_block_size": moe_align_block_size, "rmsnorm": rmsnorm}.items():
        with pytest.raises(NotImplementedError, match=rf"sgl_kernel\.{name} .* install sglang-kernel on a GPU host"):
            kernel(torch.ones(1), eps=1e-6)


def test_special_names_stay_missing_so_that_python_does_not_take_the_stand_in_for_more_than_it_is() -> None:
    for name in ("__version__", "__all__", "__wrapped__"):
        assert not hasattr(kernel_stand_in, name)


def test_the_operator_by_which_sglang_recognises_compiled_cpu_kernels_stays_undefined() -> None:
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_initialising_takes_back_the_promise_of_a_shared_memory_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "2")
    torch.ops.sgl_kernel.initialize(2, 0)
    assert "LOCAL_SIZE" not in os.environ
    torch.ops.sgl_kernel.initialize(2, 0)  # works also without the variable


# Where SGLang finds it


def test_sgl_kernel_is_the_stand_in_and_its_submodules_stay_missing() -> None:
    from sglang_hybrid.integration.cpu_host.startup import _KernelFinder

    spec = _KernelFinder().find_spec("sgl_kernel")
    assert spec is not None and spec.loader is not None
    assert spec.loader.create_module(spec) is kernel_stand_in
    assert _KernelFinder().find_spec("sgl_kernel.flash_attn") is None
    assert _KernelFinder().find_spec("some_other_module") is None


def test_a_real_sgl_kernel_wins_over_the_stand_in(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("real = True\n")
    package = importlib.import_module("sglang_hybrid").__file__
    assert package is not None
    root = Path(package).parents[1]
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n"
        "from sglang_hybrid.integration.cpu_host import startup\n"
        "startup.run(); startup.run()\n"
        "import sgl_kernel; assert sgl_kernel.real is True\n"
        "assert 'torch' not in sys.modules, 'startup must stay cheap'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
