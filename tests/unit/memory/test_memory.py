"""Host memory: the shared region, page arithmetic, updates of digests, and capacity."""

import ctypes
import errno
import gc
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_oracle import seeded
from hypothesis import given
from hypothesis import strategies as st

from cpu_worker.mapping import Mapping
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.capacity import GIB, CapacityError, KVShape, host_pool_bytes
from sglang_hybrid.memory.device_capacity import is_compact, page_bytes
from sglang_hybrid.memory.digests import Digests
from sglang_hybrid.memory.pages import page_table, touched_pages
from sglang_hybrid.protocol import region
from sglang_hybrid.protocol.region import RegionError, SharedRegion

MIB = 1 << 20
SEEDS = st.integers(0, 2**32 - 1)


def open_descriptors() -> set[str]:
    """Return the numbers and targets of this process's open descriptors; a number alone may be used again."""
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.add(f"{entry.name} {os.readlink(entry)}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return targets


# Shared region


def test_pieces_are_zeroed_aligned_and_apart() -> None:
    shapes = [((3, 5), torch.float32), ((2 * MIB,), torch.bfloat16), ((1,), torch.uint8), ((7, 2, 2), torch.int64)]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    with SharedRegion(SharedRegion.size_for(*sizes)) as region:
        pieces = [region.take(shape, dtype) for shape, dtype in shapes]
        for piece, (shape, dtype) in zip(pieces, shapes, strict=True):
            assert (piece.shape, piece.dtype) == (torch.Size(shape), dtype)
            assert not piece.any()
            assert (piece.data_ptr() - pieces[0].data_ptr()) % (2 * MIB) == 0
        for number, piece in enumerate(pieces, start=1):
            piece.fill_(number)
        for number, piece in enumerate(pieces, start=1):
            assert (piece == number).all()


def test_a_piece_starts_on_a_2_mib_boundary_of_the_file() -> None:
    with SharedRegion(6 * MIB) as region:
        for _ in range(3):
            region.take((5,), torch.uint8).fill_(9)
        with mmap.mmap(region.fd, region.size, access=mmap.ACCESS_READ) as whole:
            marked = [offset for offset in range(0, region.size, MIB) if whole[offset] == 9]
    assert marked == [0, 2 * MIB, 4 * MIB]


def test_a_region_has_huge_pages_for_server_and_worker_without_a_setting_of_root() -> None:
    with SharedRegion(8 * MIB, name="test-huge") as region:
        mapped = Mapping(region.fd, region.size, writable=False)
        mapped.populate(1, lambda: False)
        assert region.address % (2 * MIB) == 0 and mapped.address % (2 * MIB) == 0
        mappings = Path("/proc/self/smaps").read_text().split(f"{mapped.address:x}-")
        mapped.close()
        if not region.huge_bytes():  # pages of another size, Linux before 6.1, or no huge page is free
            pytest.skip("this kernel gives no huge pages to shared memory")
        assert region.huge_bytes() == 8 * MIB
        assert re.search(r"ShmemPmdMapped: +8192 kB", mappings[1])


def test_a_region_whose_last_tensor_is_gone_is_unmapped() -> None:
    region = SharedRegion(4 * MIB, name="test-unmapped")
    piece = region.take((MIB,), torch.uint8)
    region.close()
    del region
    gc.collect()
    assert piece.fill_(5).sum() == 5 * MIB
    del piece
    gc.collect()
    assert "test-unmapped" not in Path("/proc/self/maps").read_text()


def test_a_mapping_that_the_system_refuses_leaves_no_address_space_behind(tmp_path: Path) -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    (tmp_path / "file").write_bytes(b"x" * 100)
    with (tmp_path / "file").open("rb") as file, pytest.raises(PermissionError):
        Mapping(file.fileno(), 512 * MIB, writable=True)
    assert abs(Path("/proc/self/maps").read_text().count("\n") - before) <= 1


def test_a_regions_memory_is_touched_first_on_the_cores_that_it_shall_be_near_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near = {min(os.sched_getaffinity(0))}
    bound: list[set[int]] = []
    really = os.sched_setaffinity

    def bind(pid: int, cpus: set[int]) -> None:
        bound.append(set(cpus))
        really(pid, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    allowed = os.sched_getaffinity(0)
    with SharedRegion(MIB, cpus=near) as region:
        assert region.size >= MIB
    assert bound == [near] and os.sched_getaffinity(0) == allowed, "only the threads that touch are bound"
    with SharedRegion(MIB, cpus={4000}):
        assert "host memory may be on another NUMA node" in caplog.text


def test_size_for_is_just_enough() -> None:
    pieces = (1, 2 * MIB, 2 * MIB + 1)
    with SharedRegion(SharedRegion.size_for(*pieces)) as region:
        for size in pieces:
            region.take((size,), torch.uint8)
        with pytest.raises(RegionError):
            region.take((1,), torch.uint8)


_CHILD = """
import mmap, sys
with mmap.mmap(int(sys.argv[1]), int(sys.argv[2])) as region:
    assert region[4 << 20 : (4 << 20) + 8] == (42).to_bytes(8, sys.byteorder), "the parent's write"
    region[0:8] = (7).to_bytes(8, sys.byteorder)
"""


def test_another_process_with_the_descriptor_sees_the_same_memory() -> None:
    with SharedRegion(6 * MIB, others_write=True) as region:
        first, second = region.take((4 * MIB // 8,), torch.int64), region.take((3,), torch.int64)
        second[0] = 42
        child = [sys.executable, "-S", "-c", _CHILD, str(region.fd), str(region.size)]
        subprocess.run(child, pass_fds=[region.fd], check=True)
        assert first[:2].tolist() == [7, 0]


def test_who_is_handed_the_pool_can_read_it_and_never_write_it() -> None:
    with SharedRegion(2 * MIB) as region:
        region.take((1,), torch.uint8).fill_(3)
        with mmap.mmap(region.fd, region.size, access=mmap.ACCESS_READ) as seen:
            assert seen[0] == 3
        with pytest.raises(PermissionError):
            mmap.mmap(region.fd, region.size)
        with pytest.raises(PermissionError):
            os.pwrite(region.fd, b"x", 0)


@pytest.mark.parametrize("side", ["server", "worker"])
def test_a_region_is_not_in_core_files(side: str) -> None:
    with SharedRegion(2 * MIB, name=f"test-dump-{side}") as region:
        mapped = Mapping(region.fd, region.size, writable=False) if side == "worker" else None
        address = mapped.address if mapped else region.address
        flags = smaps_flags(address)
        if mapped:
            mapped.close()
    assert "dd" in flags  # "dd": do not include in core dumps


def smaps_flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that begins at an address."""
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")
    flags = re.search("VmFlags: (.*)", mapping)
    assert flags is not None
    return flags[1].split()


def test_the_descriptor_is_not_inherited_by_accident() -> None:
    with SharedRegion(MIB) as region:
        assert not os.get_inheritable(region.fd)


def test_a_tensor_outlives_its_closed_region() -> None:
    region = SharedRegion(2 * MIB)
    piece = region.take((1000,), torch.int64)
    region.close()
    region.close()  # a second call does nothing
    del region
    gc.collect()
    piece.copy_(torch.arange(1000))
    assert piece.sum() == 499500


def test_nothing_stays_open_once_region_and_tensors_are_gone() -> None:
    before = open_descriptors()
    with SharedRegion(2 * MIB) as region:
        piece = region.take((10,), torch.int64)
        assert open_descriptors() != before
    del region, piece
    gc.collect()
    assert open_descriptors() == before


def test_a_region_has_no_name_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    with SharedRegion(2 * MIB, name="test-has-no-name"):
        assert not any("test-has-no-name" in name for name in set(os.listdir("/dev/shm")) - before)


def test_memory_is_taken_when_the_region_is_made() -> None:
    with SharedRegion(6 * MIB) as region:
        assert os.fstat(region.fd).st_blocks * 512 >= 6 * MIB


def test_taking_too_much_says_how_many_bytes_are_missing_and_takes_nothing() -> None:
    with SharedRegion(4 * MIB) as region:
        region.take((1,), torch.uint8)
        with pytest.raises(RegionError, match=r"4194304 bytes .* 96 bytes are missing"):
            region.take((2 * MIB + 96,), torch.uint8)
        assert region.take((2 * MIB,), torch.uint8).numel() == 2 * MIB


@pytest.mark.parametrize(
    "size",
    [0, 2**60, 2**62, 2**63],
)
def test_an_impossible_size_is_refused_with_the_number_and_leaves_nothing_open(size: int) -> None:
    before = open_descriptors()
    with pytest.raises(RegionError, match=rf"{size / 2**30:.2f} GiB"):
        SharedRegion(size)
    gc.collect()
    assert open_descriptors() == before


class NoRoom:
    """Stand-in for the C library whose ``madvise`` fails: on a host without free memory, or with an old kernel."""

    def __init__(self, error: int) -> None:
        self._error = error

    def madvise(self, *_: object) -> int:
        ctypes.set_errno(self._error)
        return -1


def test_a_host_without_room_for_the_region_is_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_libc", NoRoom(errno.ENOMEM))
    before = open_descriptors()
    with pytest.raises(RegionError, match=r"0\.50 GiB .* Cannot allocate memory"):
        SharedRegion(512 * MIB)
    gc.collect()
    assert open_descriptors() == before


def test_a_kernel_that_cannot_populate_a_mapping_allocates_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_libc", NoRoom(errno.EINVAL))
    with SharedRegion(16 * MIB) as made:
        assert os.fstat(made.fd).st_blocks * 512 == 16 * MIB


def test_a_region_takes_its_memory_at_once_and_cannot_be_shrunk() -> None:
    with SharedRegion(16 * MIB) as made:
        assert os.fstat(made.fd).st_blocks * 512 == 16 * MIB
        for size in (0, 32 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(made.fd, size)


# Pages


@given(SEEDS, st.sampled_from([4, 32]), st.integers(1, 4))
def test_touched_pages_are_the_pages_written_and_how_full_they_are(seed: int, page_tokens: int, requests: int) -> None:
    random = seeded(seed)
    pages = (torch.randperm(50, generator=random)[: requests * 3]).view(requests, 3)
    slots, filled = [], {}
    for own in pages:
        # a request continues somewhere in its first page and ends somewhere in one of the three
        start = int(torch.randint(0, page_tokens, (1,), generator=random))
        end = int(torch.randint(start + 1, 3 * page_tokens + 1, (1,), generator=random))
        for position in range(start, end):
            page = int(own[position // page_tokens])
            slots.append(page * page_tokens + position % page_tokens)
            filled[page] = position % page_tokens + 1
    found, counts = touched_pages(torch.tensor(slots), page_tokens)
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == filled


def test_padding_tokens_that_share_slot_0_touch_page_0_once() -> None:
    pages, filled = touched_pages(torch.tensor([0, 0, 64, 0]), 32)
    assert (pages.tolist(), filled.tolist()) == ([0, 2], [1, 1])


def request_table(rows: list[list[int]], page_tokens: int, width: int) -> torch.Tensor:
    """Return a table like SGLang's req_to_token: int32, the slot of each token of each request."""
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    for row, pages in enumerate(rows):
        for position, page in enumerate(pages):
            first = position * page_tokens
            table[row, first : first + page_tokens] = torch.arange(page_tokens) + page * page_tokens
    return table


@pytest.mark.parametrize(("longest", "columns"), [(1, 1), (4, 1), (5, 2), (8, 2), (12, 3)])
def test_a_page_table_has_one_column_per_started_page_of_the_longest_row(longest: int, columns: int) -> None:
    requests = request_table([[5, 9, 1], [7, 2, 3], [4, 8, 6]], page_tokens=4, width=16)
    table = page_table(requests, torch.tensor([2, 0]), longest, 4)
    assert table.dtype == torch.int64
    assert table.tolist() == [[4, 8, 6][:columns], [5, 9, 1][:columns]]


@pytest.mark.parametrize("rows", [[0, 1], [1]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_a_page_table_is_a_copy(rows: list[int], dtype: torch.dtype, page_tokens: int) -> None:
    requests = request_table([[5, 9], [7, 2]], page_tokens, width=2 * page_tokens).to(dtype)
    table = page_table(requests, torch.tensor(rows), 2 * page_tokens, page_tokens)
    before = table.clone()
    requests.zero_()
    assert torch.equal(table, before)
    table.fill_(1)
    assert not requests.any()


# Digests


def assert_digest(table: torch.Tensor, page: int, keys: torch.Tensor) -> None:
    """Check the digest of one page against its keys ``[H, n, D]``."""
    assert torch.equal(table[page], torch.stack((keys.amax(dim=1), keys.amin(dim=1)), dim=1))


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(DTYPES, st.integers(1, 3), SEEDS)
def test_a_refresh_builds_the_digests_of_its_pages_and_of_no_others(dtype: torch.dtype, heads: int, seed: int) -> None:
    random = seeded(seed)
    keys = torch.randn(10, heads, 8, 16, generator=random).to(dtype)
    digests = Digests(layers=2, pages=10, heads=heads, head_dim=16, dtype=dtype, device="cpu")
    pages = torch.randperm(10, generator=random)[:4]
    filled = torch.randint(1, 9, (4,), generator=random)
    digests.refresh(1, keys, pages, filled)
    for page, count in zip(pages.tolist(), filled.tolist(), strict=True):
        assert_digest(digests.of_layer(1), page, keys[page, :, :count])
    untouched = [page for page in range(10) if page not in pages.tolist()]
    assert not digests.of_layer(1)[untouched].any()
    assert not digests.of_layer(0).any()


@given(DTYPES, st.integers(1, 3), SEEDS, st.integers(1, 40))
def test_writing_token_by_token_ends_at_the_same_digests_as_writing_at_once(
    dtype: torch.dtype, heads: int, seed: int, tokens: int
) -> None:
    page_tokens, random = 8, seeded(seed)
    pages = torch.randperm(10, generator=random)[:5]
    slots = (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()[:tokens]
    new_keys = torch.randn(tokens, heads, 16, generator=random).to(dtype)
    keys = torch.full((10, heads, page_tokens, 16), float("nan"), dtype=dtype)  # pages are not cleared before use

    digests = Digests(layers=1, pages=10, heads=heads, head_dim=16, dtype=dtype, device="cpu")
    for slot, key in zip(slots, new_keys, strict=True):
        keys[slot // page_tokens, :, slot % page_tokens] = key
        digests.refresh(0, keys, *touched_pages(slot[None], page_tokens))

    at_once = Digests(layers=1, pages=10, heads=heads, head_dim=16, dtype=dtype, device="cpu")
    at_once.refresh(0, keys, *touched_pages(slots, page_tokens))
    assert torch.equal(digests.of_layer(0), at_once.of_layer(0))
    for number, page in enumerate(pages.tolist()):
        own = new_keys[number * page_tokens : (number + 1) * page_tokens]
        if len(own):
            assert_digest(digests.of_layer(0), page, own.transpose(0, 1))


def test_the_next_user_of_a_page_starts_its_digest_anew() -> None:
    keys = torch.full((2, 1, 4, 8), 100.0)
    digests = Digests(layers=1, pages=2, heads=1, head_dim=8, dtype=torch.float32, device="cpu")
    digests.refresh(0, keys, torch.tensor([1]), torch.tensor([4]))
    keys[1, :, 0] = 2.0  # the other three keys are those of the page's last user
    digests.refresh(0, keys, *touched_pages(torch.tensor([4]), 4))
    assert (digests.of_layer(0)[1] == 2.0).all()


def test_bytes_per_page_is_what_a_page_of_all_layers_takes() -> None:
    digests = Digests(layers=3, pages=7, heads=2, head_dim=16, dtype=torch.bfloat16, device="cpu")
    taken = sum(digests.of_layer(layer).nbytes for layer in range(3))
    page = page_bytes(HybridConfig(), KVShape(3, 2, 16, 16, torch.bfloat16.itemsize), "cpu")
    assert taken == 7 * page.digests == 7 * 3 * 2 * 2 * 16 * 2


# Capacity

SMALL_MODEL = KVShape(layers=30, kv_heads=3, key_dim=64, value_dim=64, itemsize=2)  # 23,040 bytes per token
LEAST = 2048 * 23040  # the default budget
OVERHEAD = 32 * 23040 + 2 * 30 * (2 << 20)  # the padding page, and the ends of the buffers


def test_a_token_costs_its_keys_and_values_in_all_layers() -> None:
    assert SMALL_MODEL.bytes_per_token == 23040
    assert KVShape(layers=2, kv_heads=3, key_dim=5, value_dim=7, itemsize=4).bytes_per_token == 2 * 3 * 12 * 4


@pytest.mark.parametrize(("host_memory", "share"), [("auto", 7 * GIB // 2), ("50%", 5 * GIB // 2), ("4GiB", 2 * GIB)])
def test_ranks_share_the_host_memory_evenly(host_memory: str, share: int) -> None:
    config = HybridConfig(host_memory=host_memory)
    assert host_pool_bytes(config, SMALL_MODEL, available=10 * GIB, ranks=1) == 2 * share - OVERHEAD
    assert host_pool_bytes(config, SMALL_MODEL, available=10 * GIB, ranks=2) == share - OVERHEAD


@pytest.mark.parametrize(("host_memory", "share"), [("auto", 7 * GIB // 2), ("4GiB", 2 * GIB)])
def test_a_rank_that_comes_later_gets_the_share_of_what_was_there_at_the_start(host_memory: str, share: int) -> None:
    config = HybridConfig(host_memory=host_memory)
    left = 10 * GIB - share  # the first rank has taken its share
    assert host_pool_bytes(config, SMALL_MODEL, available=left, ranks=2, at_start=10 * GIB) == share - OVERHEAD


def test_weights_that_were_loaded_meanwhile_make_the_pool_smaller() -> None:
    config = HybridConfig(host_memory="50%")
    assert host_pool_bytes(config, SMALL_MODEL, available=4 * GIB, ranks=1, at_start=10 * GIB) == 2 * GIB - OVERHEAD


def test_asking_for_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"host_memory=40GiB asks for 40\.00 GiB, but only 10\.00 GiB"):
        host_pool_bytes(HybridConfig(host_memory="40GiB"), SMALL_MODEL, available=10 * GIB, ranks=1)


def test_all_of_the_available_memory_may_be_asked_for() -> None:
    assert host_pool_bytes(HybridConfig(host_memory="100%"), SMALL_MODEL, available=GIB, ranks=1) == GIB - OVERHEAD


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_pool_below_one_budget_is_refused_and_one_byte_more_is_not(ranks: int) -> None:
    config = HybridConfig(host_memory="100%")
    assert host_pool_bytes(config, SMALL_MODEL, available=(LEAST + OVERHEAD) * ranks, ranks=ranks) == LEAST
    with pytest.raises(CapacityError):
        host_pool_bytes(config, SMALL_MODEL, available=(LEAST + OVERHEAD) * ranks - 1, ranks=ranks)


def test_the_refusal_of_a_small_pool_carries_every_number_that_led_to_it() -> None:
    with pytest.raises(CapacityError) as caught:
        host_pool_bytes(HybridConfig(host_memory="272MiB"), SMALL_MODEL, available=10 * GIB, ranks=2)
    message = str(caught.value)
    for part in (
        "host_memory=272MiB",
        "a pool of 696 tokens",  # (136 MiB - 120 MiB) per rank / 23,040, less the padding page
        "one budget of 2048",
        "at least 332MiB",
        "or lower budget_tokens",
        "23040 bytes (30 layers x 3 KV heads x 64 + 64 channels x 2 bytes)",
        "10.00 GiB of host memory are available",
        "2 rank(s)",
    ):
        assert part in message


def advised_size(refusal: CapacityError) -> str:
    found = re.search(r"to at least ([0-9]+MiB)", str(refusal))
    assert found is not None
    return found[1]


def test_doing_what_the_refusal_says_is_enough() -> None:
    with pytest.raises(CapacityError) as caught:
        host_pool_bytes(HybridConfig(host_memory="1MiB"), SMALL_MODEL, available=10 * GIB, ranks=1)
    advised = HybridConfig(host_memory=advised_size(caught.value))
    assert host_pool_bytes(advised, SMALL_MODEL, available=10 * GIB, ranks=1) >= LEAST


@pytest.mark.parametrize(
    ("digest_dtype", "channels", "head_dim", "device", "expected"),
    [
        ("auto", 32, 128, "cuda", True),
        ("auto", 32, 128, "cpu", False),
        ("auto", 0, 128, "cuda", False),
        ("auto", 32, 80, "cuda", False),
        ("auto", 12, 128, "cuda", False),
        ("model", 32, 128, "cuda", False),
        ("int8", 32, 128, "cpu", True),
    ],
)
def test_digests_are_compact_where_that_saves_time_or_is_asked_for(
    digest_dtype: str, channels: int, head_dim: int, device: str, expected: bool
) -> None:
    assert is_compact(digest_dtype, channels, head_dim, device) == expected
