"""The mailbox: its layout, and its client and its engine together in this process."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mailbox_host import SCALE, Host, Lists, assert_same_bits, collected
from worker_process import BLOCK_TOKENS, PATIENCE_S, eventually

from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.cpu import NativeError
from sglang_hybrid.ops.cpu.library import checked, library, mailbox_fields
from sglang_hybrid.ops.cpu.structs import (
    MAILBOX_VERSION,
    MASKS,
    VALUE_SUMS,
    EngineStats,
    Geometry,
    Job,
    MailboxLayout,
)
from sglang_hybrid.protocol.mailbox import DAMAGED, OVERWRITTEN, SERVED, Mailbox
from sglang_hybrid.protocol.region import SharedRegion

LATE = 0
SLOTS = 2
ATTEND_MASKED = 1  # PostKind of mailbox.h
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "fp8 float32": 1e-5, "fp8 bfloat16": 1e-2}
WORDS = {4: ctypes.c_uint32, 8: ctypes.c_uint64}


class Behind:
    """Direct access to the words of a mailbox in memory, past client and worker."""

    def __init__(self, mailbox: Mailbox, geometry: Geometry) -> None:
        self._rows, self._heads, self._max_blocks = geometry.rows, geometry.kv_heads, geometry.max_blocks
        self._start = mailbox.region.address
        self._layout = layout_of(geometry)
        self._fields = mailbox_fields()

    def word(self, array: str, record: str, name: str, index: int = 0) -> Any:
        """Return a field of a record as a ctypes integer whose memory is the mailbox."""
        offset, size = self._fields[record][name]
        _, stride = self._fields[record][""]
        return WORDS[size].from_address(self._start + getattr(self._layout, array) + index * stride + offset)

    def reply(self, sequence: int, row: int, name: str) -> Any:
        return self.word("replies", "Reply", name, sequence % SLOTS * self._rows + row)

    def write_reply(self, sequence: int, row: int, generation: int, status: int = 0) -> None:
        """Write a reply as a worker does: the sequence number last, after all other fields."""
        self.check(sequence, row).value = self.check_of_request(sequence, row)
        self.reply(sequence, row, "generation").value = generation
        self.reply(sequence, row, "status").value = status
        self.reply(sequence, row, "sequence").value = sequence

    def check(self, sequence: int, row: int) -> Any:
        return self._array(ctypes.c_uint64, "checks", sequence, row, 1)[0]

    def pages(self, sequence: int, row: int, head: int) -> Any:
        words = self._array(ctypes.c_uint32, "pages", sequence, row, self._heads * self._max_blocks)
        return words[head * self._max_blocks :]

    def masks(self, sequence: int, row: int, head: int) -> Any:
        words = self._array(ctypes.c_uint32, "masks", sequence, row, self._heads * self._max_blocks)
        return words[head * self._max_blocks :]

    def list_word(self, sequence: int, row: int, head: int, name: str) -> Any:
        return self.word("lists", "List", name, (sequence % SLOTS * self._rows + row) * self._heads + head)

    def check_of_request(self, sequence: int, row: int) -> int:
        """Compute the checksum of a row's request in the mailbox by its definition; 0 if the row has no blocks."""
        layer, scale, kind = (
            self.word("posts", "Post", name, sequence % SLOTS).value for name in ("layer", "scale", "kind")
        )
        numbers: list[int] = [layer | kind << 32, scale]
        masks: list[int] = []
        if not self.word("requests", "Request", "blocks", sequence % SLOTS * self._rows + row).value:
            return 0
        for head in range(self._heads):
            count, last_fill = (self.list_word(sequence, row, head, name).value for name in ("count", "last_fill"))
            pages = [word.value for word in self.pages(sequence, row, head)[:count]]
            numbers += [count, last_fill if count else 0, *pages, *[0] * (self._max_blocks - count)]
            if kind == ATTEND_MASKED:
                own = [word.value for word in self.masks(sequence, row, head)[:count]]
                masks += [*own, *[0] * (self._max_blocks - count)]
        return sum(n * 0x9E3779B97F4A7C15 * (2 * place + 1) for place, n in enumerate(numbers + masks)) % (1 << 64)

    def _array(self, kind: Any, array: str, sequence: int, row: int, per_row: int) -> list[Any]:
        first = getattr(self._layout, array) + (sequence % SLOTS * self._rows + row) * per_row * ctypes.sizeof(kind)
        return [kind.from_address(self._start + first + i * ctypes.sizeof(kind)) for i in range(per_row)]


def layout_of(geometry: Geometry) -> MailboxLayout:
    layout = MailboxLayout()
    checked(library().sh_mailbox_layout, ctypes.byref(geometry), ctypes.byref(layout))
    return layout


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


@pytest.fixture
def mailbox(host: Host) -> Iterator[Mailbox]:
    made = Mailbox(host.geometry)
    yield made
    made.region.close()


@pytest.fixture
def behind(mailbox: Mailbox, host: Host) -> Behind:
    return Behind(mailbox, host.geometry)


# -- layout ------------------------------------------------------------------------------------


def test_records_are_where_the_header_says() -> None:
    """A change of this table needs a new MAILBOX_VERSION: processes with different layouts must refuse each other."""
    assert MAILBOX_VERSION == 4
    fields = {record: {name: place for name, place in names.items() if name} for record, names in _fields()}
    assert fields == {
        "Header": {
            "magic": (0, 8), "version": (8, 4), "header_bytes": (12, 4), "mailbox_bytes": (16, 8), "geometry": (24, 72),
        },
        "Geometry": {
            "rows": (0, 4), "kv_heads": (4, 4), "group": (8, 4), "head_dim": (12, 4), "dtype": (16, 4),
            "max_blocks": (20, 4), "layers": (24, 4), "pages": (28, 4), "keys": (32, 8), "values": (40, 8),
            "layer_stride": (48, 8), "pool_bytes": (56, 8), "flags": (64, 8),
        },
        "Bell": {"posted": (0, 8)},
        "WorkerLine": {"completed": (0, 8), "heartbeat": (8, 8), "parked": (16, 4), "done": (20, 4), "life": (24, 4)},
        "ClientLine": {"wake": (0, 4), "waiting": (4, 4), "gone": (8, 8)},
        "Post": {"sequence": (0, 8), "layer": (8, 4), "rows": (12, 4), "scale": (16, 4), "kind": (20, 4)},
        "Request": {"sequence": (0, 8), "generation": (8, 4), "blocks": (12, 4)},
        "Reply": {"sequence": (0, 8), "generation": (8, 4), "status": (12, 4)},
        "List": {"count": (0, 4), "last_fill": (4, 4)},
    }  # fmt: skip
    assert {record: names[""] for record, names in _fields()} == {
        "Header": (0, 96), "Geometry": (0, 72), "Bell": (0, 128), "WorkerLine": (0, 128), "ClientLine": (0, 128),
        "Post": (0, 64), "Request": (0, 16), "Reply": (0, 16), "List": (0, 8),
    }  # fmt: skip


def _fields() -> list[tuple[str, dict[str, tuple[int, int]]]]:
    return list(mailbox_fields().items())


def test_python_sees_the_geometry_as_the_header_does() -> None:
    fields = mailbox_fields()["Geometry"]
    assert fields.pop("") == (0, ctypes.sizeof(Geometry))
    assert list(fields) == [name for name, _ in Geometry._fields_]
    for name, place in fields.items():
        described = getattr(Geometry, name)
        assert (described.offset, described.size) == place


@pytest.mark.parametrize("flags", [0, MASKS, VALUE_SUMS, MASKS | VALUE_SUMS])
def test_parts_of_a_mailbox_do_not_overlap(flags: int) -> None:
    geometry = Host(flags=flags).geometry
    layout, sizes = layout_of(geometry), {name: f[""][1] for name, f in _fields()}
    rows = SLOTS * geometry.rows
    values = rows * geometry.kv_heads * geometry.group * geometry.head_dim
    parts = [
        (0, sizes["Header"]),
        (layout.bell, sizes["Bell"]),
        (layout.worker, sizes["WorkerLine"]),
        (layout.client, sizes["ClientLine"]),
        (layout.posts, SLOTS * sizes["Post"]),
        (layout.requests, rows * sizes["Request"]),
        (layout.replies, rows * sizes["Reply"]),
        (layout.lists, rows * geometry.kv_heads * sizes["List"]),
        (layout.pages, rows * geometry.kv_heads * geometry.max_blocks * 4),
        (layout.masks, rows * geometry.kv_heads * geometry.max_blocks * 4 if flags & MASKS else 0),
        (layout.queries, values * 4),
        (layout.weights, values // geometry.head_dim * geometry.max_blocks * 128 if flags & VALUE_SUMS else 0),
        (layout.outputs, values * 4),
        (layout.lses, rows * geometry.kv_heads * geometry.group * 4),
        (layout.bytes, 0),
    ]
    for (start, size), (following, _) in itertools.pairwise(parts):
        assert start + size <= following
    for start in (layout.bell, layout.worker, layout.client):  # cache lines that both processes use
        assert start % 128 == 0


# -- attaching ---------------------------------------------------------------------------------


def check(mailbox: Mailbox, geometry: Geometry, size: int | None = None, pool_bytes: int | None = None) -> Geometry:
    found = Geometry()
    checked(
        library().sh_mailbox_check, mailbox.region.address, mailbox.region.size if size is None else size,
        geometry.pool_bytes if pool_bytes is None else pool_bytes, ctypes.byref(found),
    )  # fmt: skip
    return found


def test_a_mailbox_tells_its_geometry_to_whoever_attaches(mailbox: Mailbox, host: Host) -> None:
    assert bytes(check(mailbox, host.geometry)) == bytes(host.geometry)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("magic", 0, "not a mailbox"),
        ("version", 3, "a mailbox of version 3, this side has version 4"),
        ("version", 0, "a mailbox of version 0, this side has version 4"),
        ("header_bytes", 88, "the mailbox has a header of 88 bytes, this side has 96"),
        ("mailbox_bytes", 4096, "the mailbox has 4096 bytes, its geometry needs {bytes}"),
        ("mailbox_bytes", 1 << 60, "bytes, its geometry needs {bytes}"),
    ],
)
def test_a_header_of_another_kind_is_refused(
    mailbox: Mailbox, host: Host, field: str, value: int, sentence: str
) -> None:
    offset, size = mailbox_fields()["Header"][field]
    WORDS[size].from_address(mailbox.region.address + offset).value = value
    with pytest.raises(NativeError) as refused:
        check(mailbox, host.geometry)
    assert sentence.format(bytes=layout_of(host.geometry).bytes) in str(refused.value)


@pytest.mark.parametrize(("size", "sentence"), [(0, "too small for a mailbox"), (96, "96 bytes, its")])
def test_a_mailbox_that_is_too_small_is_refused(mailbox: Mailbox, host: Host, size: int, sentence: str) -> None:
    with pytest.raises(NativeError, match=sentence):
        check(mailbox, host.geometry, size=size)


def test_a_pool_of_another_size_is_refused(mailbox: Mailbox, host: Host) -> None:
    true = host.geometry.pool_bytes
    with pytest.raises(NativeError, match=f"is for a pool of {true} bytes, this one has {true - 1}"):
        check(mailbox, host.geometry, pool_bytes=true - 1)


OUT_OF_RANGE = [
    ("rows", 0, "rows must be 1 to 65536"),
    ("rows", 65537, "rows must be 1 to 65536"),
    ("kv_heads", 0, "KV heads must be 1 to 256"),
    ("kv_heads", 257, "KV heads must be 1 to 256"),
    ("group", 0, "query heads per KV head must be 1 to 16"),
    ("group", 17, "query heads per KV head must be 1 to 16"),
    ("head_dim", 0, "head_dim must be a multiple of 8 up to 256"),
    ("head_dim", 63, "head_dim must be a multiple of 8 up to 256"),
    ("head_dim", 264, "head_dim must be a multiple of 8 up to 256"),
    ("dtype", 6, "the dtype must be bfloat16, float16 or float32, or FP8 with queries of one of these"),
    ("max_blocks", 0, "blocks of a list must be 1 to 1048576"),
    ("max_blocks", (1 << 20) + 1, "blocks of a list must be 1 to 1048576"),
    ("layers", 0, "layers must be 1 to 4096"),
    ("layers", 4097, "layers must be 1 to 4096"),
    ("layers", 3, "the pool is smaller than its layers"),
    ("pages", 0, "the pool has no pages"),
    ("pages", 13, "layers overlap in the pool"),
    ("pages", (1 << 32) - 1, "layers overlap in the pool"),
    ("keys", 4, "keys and values must be aligned to 64 bytes"),
    ("values", (1 << 64) - 64, "the pool is smaller than its layers"),
    ("keys", (1 << 64) - 64, "the pool is smaller than its layers"),
    ("layer_stride", 64, "layers overlap in the pool"),
    ("layer_stride", (1 << 64) - 64, "the pool is smaller than its layers"),
    ("pool_bytes", 64, "the pool is smaller than its layers"),
    ("flags", 1 << 63, "flags that this side does not know"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), OUT_OF_RANGE)
def test_a_geometry_out_of_range_is_refused_by_both_sides(
    mailbox: Mailbox, host: Host, field: str, value: int, sentence: str
) -> None:
    wrong = Geometry.from_buffer_copy(host.geometry)
    setattr(wrong, field, value)
    with pytest.raises(NativeError, match=sentence):
        Mailbox(wrong)
    # a damaged or hostile client could write this itself
    offset, size = mailbox_fields()["Header"]["geometry"]
    ctypes.memmove(mailbox.region.address + offset, ctypes.byref(wrong), size)
    with pytest.raises(NativeError, match=sentence):
        check(mailbox, host.geometry, pool_bytes=wrong.pool_bytes)
    with SharedRegion(1) as region, pytest.raises(NativeError, match=sentence):
        checked(library().sh_mailbox_create, region.address, region.size, ctypes.byref(wrong))


def test_nothing_is_created_in_a_region_that_is_too_small(host: Host) -> None:
    needed = layout_of(host.geometry).bytes
    with SharedRegion(1) as region:
        with pytest.raises(NativeError, match=f"the mailbox has {needed - 1} bytes and needs {needed}"):
            checked(library().sh_mailbox_create, region.address, needed - 1, ctypes.byref(host.geometry))
        assert not region.take((region.size,), torch.uint8).any()


# -- posts and replies -------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 5, 16]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    rows=st.integers(1, Host.rows),
    listed=st.integers(0, Host.max_blocks),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_replies_have_the_bits_of_this_process_and_the_values_of_the_reference(
    dtype: str, kv_heads: int, group: int, head_dim: int, rows: int, listed: int, threads: int, seed: int
) -> None:
    host = Host(dtype, kv_heads, group, head_dim)
    mailbox = Mailbox(host.geometry)
    with mailbox.region, host.engine(mailbox, threads):
        for layer in range(host.layers):
            lists = host.random_lists(rows, listed, seed + layer)
            replied = host.on_host(lists, layer)
            assert collected(mailbox, replied, mailbox.post(replied, generation=seed)) == 0
            assert (replied.outcome == SERVED).all()
            assert_same_bits(replied, host.computed_here(lists, layer))
            keys, values = host.pool[:, layer]
            out, lse = reference.attend_blocks(lists.query, keys, values, lists.ids, lists.fill, SCALE)
            torch.testing.assert_close(replied.out, out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            torch.testing.assert_close(replied.lse, lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_only_tokens_whose_bit_is_set_are_attended(dtype: str, threads: int) -> None:
    host = Host(dtype, flags=MASKS)
    host.pool[:, :, :, :, 7] = torch.nan  # no mask has token 7
    mailbox = Mailbox(host.geometry)
    with mailbox.region, host.engine(mailbox, threads):
        for seed in range(8):
            lists = host.masked_lists(host.rows, host.max_blocks, seed)
            assert lists.masks is not None
            lists.masks.bitwise_and_(~(1 << 7))
            replied = host.on_host(lists, layer=1)
            assert collected(mailbox, replied, mailbox.post(replied, seed)) == 0
            assert_same_bits(replied, host.computed_here(lists, layer=1))
            keys, values = host.pool[:, 1]
            out, lse = reference.attend_blocks(
                lists.query,
                keys.float().nan_to_num(),
                values.float().nan_to_num(),
                lists.ids,
                lists.fill,
                SCALE,
                masks=lists.masks,
            )
            torch.testing.assert_close(replied.out, out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            torch.testing.assert_close(replied.lse, lse, rtol=0, atol=1e-3)


def test_masks_that_have_every_token_change_no_bit() -> None:
    host = Host(flags=MASKS)
    lists = host.random_lists(host.rows, host.max_blocks, 5)
    masked = Lists(lists.query, lists.ids, lists.fill, torch.full_like(lists.ids, -1, dtype=torch.int32))
    assert_same_bits(host.computed_here(masked), host.computed_here(lists))


def test_lists_without_masks_are_posted_to_a_mailbox_that_has_room_for_them() -> None:
    host = Host(flags=MASKS)
    mailbox = Mailbox(host.geometry)
    with mailbox.region, host.engine(mailbox):
        for sent in (host.masked_lists(4, 5, 1), host.random_lists(4, 5, 2), host.masked_lists(4, 5, 3)):
            lists = host.on_host(sent)
            assert collected(mailbox, lists, mailbox.post(lists, 0)) == 0
            assert_same_bits(lists, host.computed_here(sent))


def test_a_mailbox_without_masks_has_no_room_for_them_and_refuses_them(mailbox: Mailbox, host: Host) -> None:
    layout = layout_of(host.geometry)
    assert layout.masks == layout.queries
    with pytest.raises(NativeError, match=r"the policy has to declare Needs\(masks=True\)"):
        mailbox.post(host.on_host(host.masked_lists(2, 3, 1)), 0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_are_summed_by_the_weights_of_the_post(dtype: str, threads: int) -> None:
    host = Host(dtype, flags=MASKS | VALUE_SUMS)
    host.pool[0] = torch.nan  # no key is read
    mailbox = Mailbox(host.geometry)
    with mailbox.region, host.engine(mailbox, threads):
        for seed in range(8):
            lists = host.random_lists(host.rows, host.max_blocks, seed)
            weights = host.random_weights(lists, seed)
            weights[..., 5] = 0.0
            values = host.pool[1, 1]
            values[:, :, 5] = torch.nan  # no value with weight 0 is read
            replied = host.sums(weights, lists, layer=1)
            assert collected(mailbox, replied, mailbox.post(replied, seed)) == 0
            assert_same_bits(replied, host.sums_computed_here(weights, lists, layer=1))
            expected = reference_weights.sum_values(weights, values, lists.ids)
            torch.testing.assert_close(replied.out, expected, rtol=1e-5, atol=1e-5)
            empty = (lists.ids == reference.NO_BLOCK).all(dim=2).repeat_interleave(host.group, dim=1)
            assert torch.equal(replied.lse, torch.where(empty, -torch.inf, 0.0))


def test_sums_and_attention_are_on_their_way_at_once() -> None:
    host = Host(flags=MASKS | VALUE_SUMS)
    mailbox = Mailbox(host.geometry)
    with mailbox.region, host.engine(mailbox):
        for step in range(10):
            lists, masked = host.random_lists(4, 5, step), host.masked_lists(4, 5, step)
            weights = host.random_weights(lists, step)
            sums, attended = host.sums(weights, lists), host.on_host(masked, 1)
            sequences = [mailbox.post(sums, step), mailbox.post(attended, step)]
            assert collected(mailbox, attended, sequences[1]) == collected(mailbox, sums, sequences[0]) == 0
            assert_same_bits(sums, host.sums_computed_here(weights, lists))
            assert_same_bits(attended, host.computed_here(masked, 1))


def test_a_mailbox_without_value_sums_has_no_room_for_weights_and_refuses_them(mailbox: Mailbox, host: Host) -> None:
    layout = layout_of(host.geometry)
    assert layout.weights == layout.outputs
    lists = host.full_lists()
    with pytest.raises(NativeError, match=r"the policy has to declare Needs\(value_sums=True\)"):
        mailbox.post(host.sums(host.random_weights(lists, 1), lists), 0)


def test_what_became_of_sums_that_nobody_served_is_computed_here() -> None:
    host = Host(flags=VALUE_SUMS)
    mailbox = Mailbox(host.geometry)
    lists = host.full_lists(rows=3)
    weights = host.random_weights(lists, 2)
    with mailbox.region:
        sums = host.sums(weights, lists)
        assert collected(mailbox, sums, mailbox.post(sums, 1), timeout_s=0.0) == 3
    host.local.attend(sums, sums.outcome)
    assert_same_bits(sums, host.sums_computed_here(weights, lists))


@pytest.mark.parametrize("damage", ["kind", "mask"])
def test_an_answer_to_other_tokens_than_were_asked_for_is_never_merged(damage: str) -> None:
    host = Host(flags=MASKS)
    mailbox = Mailbox(host.geometry)
    behind = Behind(mailbox, host.geometry)
    full = host.full_lists(rows=1)
    masks = torch.full(full.ids.shape, 0x0F0F, dtype=torch.int32)
    with mailbox.region:
        lists = host.on_host(Lists(full.query, full.ids, full.fill, masks))
        sequence = mailbox.post(lists, 1)
        kind = behind.word("posts", "Post", "kind", sequence % SLOTS)
        word = {"kind": kind, "mask": behind.masks(sequence, 0, 1)[1]}[damage]
        word.value ^= 1
        with host.engine(mailbox):
            assert collected(mailbox, lists, sequence) == 1
    assert lists.outcome.tolist() == [DAMAGED]


@pytest.mark.parametrize("kind", [1, 2, 3, 1 << 31])
def test_a_post_of_a_kind_that_the_mailbox_does_not_have_is_given_up(
    mailbox: Mailbox, behind: Behind, host: Host, kind: int
) -> None:
    lists = host.on_host(host.full_lists())
    sequence = mailbox.post(lists, 1)
    behind.word("posts", "Post", "kind", sequence % SLOTS).value = kind
    with host.engine(mailbox):
        assert eventually(lambda: mailbox.caught_up)
        assert collected(mailbox, lists, sequence, timeout_s=0.0) == lists.rows
        again = host.on_host(host.full_lists())
        assert collected(mailbox, again, mailbox.post(again, 1)) == 0


def test_empty_lists_give_zero_and_minus_infinity(mailbox: Mailbox, host: Host) -> None:
    nothing = torch.full((3, host.kv_heads, 2), reference.NO_BLOCK)
    lists = host.on_host(Lists(host.full_lists(3).query, nothing, torch.zeros_like(nothing)))
    with host.engine(mailbox):
        assert collected(mailbox, lists, mailbox.post(lists, 0)) == 0
    assert not lists.out.any()
    assert (lists.lse == -torch.inf).all()


def test_two_layers_are_on_their_way_at_once_and_may_be_collected_in_any_order(mailbox: Mailbox, host: Host) -> None:
    with host.engine(mailbox):
        for step in range(20):
            sent = [host.random_lists(4, 5, 2 * step + layer) for layer in range(2)]
            lists = [host.on_host(one, layer) for layer, one in enumerate(sent)]
            sequences = [mailbox.post(one, step) for one in lists]
            assert sequences == [2 * step + 1, 2 * step + 2]
            for layer in (0, 1) if step % 2 else (1, 0):
                assert collected(mailbox, lists[layer], sequences[layer]) == 0
                assert_same_bits(lists[layer], host.computed_here(sent[layer], layer))


def test_a_parked_worker_is_woken_by_a_post_and_by_the_word_that_work_is_near(
    mailbox: Mailbox, behind: Behind, host: Host
) -> None:
    parked = behind.word("worker", "WorkerLine", "parked")
    stats = EngineStats()
    with host.engine(mailbox, spin_us=0) as engine:
        for _ in range(5):
            assert eventually(lambda: parked.value == 1)
            lists = host.on_host(host.full_lists())
            assert collected(mailbox, lists, mailbox.post(lists, 0)) == 0
        woken = behind.word("client", "ClientLine", "wake").value
        mailbox.wake()
        assert behind.word("client", "ClientLine", "wake").value == woken + 1
        library().sh_engine_read_stats(engine, ctypes.byref(stats))
    assert (stats.posts, stats.rows, stats.refused_rows, stats.abandoned_posts) == (5, 10, 0, 0)
    assert stats.parks >= 5


def test_the_heart_beats_while_the_worker_waits(mailbox: Mailbox, host: Host) -> None:
    assert mailbox.heartbeat == 0
    with host.engine(mailbox):
        assert eventually(lambda: mailbox.heartbeat >= 2)


# -- replies that must not be taken ------------------------------------------------------------

ANSWERED, REFUSED = 0, 2  # ReplyStatus


@pytest.mark.parametrize(
    ("ahead", "generation", "status", "outcome"),
    [
        (0, 7, ANSWERED, SERVED),  # without this case the others would prove nothing
        (2, 7, ANSWERED, DAMAGED),  # the reply is to the post after the next one, in the same slot
        (1 << 40, 7, ANSWERED, DAMAGED),
        (-2, 7, ANSWERED, LATE),
        (0, 6, ANSWERED, DAMAGED),
        (0, 8, ANSWERED, DAMAGED),
        (0, 7, REFUSED, DAMAGED),
        (0, 7, 12345, DAMAGED),
    ],
)
def test_a_reply_counts_only_with_the_sequence_and_the_generation_of_its_request(
    mailbox: Mailbox, behind: Behind, host: Host, ahead: int, generation: int, status: int, outcome: int
) -> None:
    for _ in range(2):  # so that both slots have been used before
        mailbox.post(host.on_host(host.full_lists()), 7)
    lists = host.on_host(host.full_lists())
    lists.lse.fill_(5.0)
    sequence = mailbox.post(lists, 7)
    behind.write_reply(sequence, 0, 7)
    behind.write_reply(sequence + ahead, 1, generation, status)
    # no other reply comes: only damage or completeness ends the wait early, so a late row costs the whole timeout
    missing = collected(mailbox, lists, sequence, timeout_s=0.05 if outcome == LATE else PATIENCE_S)
    assert lists.outcome.tolist() == [SERVED, outcome]
    assert missing == (outcome != SERVED)
    assert (lists.lse[1] == (0.0 if outcome == SERVED else 5.0)).all(), "only what counts is copied"


@pytest.mark.parametrize("damage", ["layer", "scale", "blocks", "count", "last_fill", "page"])
def test_an_answer_to_something_else_than_was_asked_is_never_merged(
    mailbox: Mailbox, behind: Behind, host: Host, damage: str
) -> None:
    """The changed word is still within all bounds, so the worker cannot notice the change and computes."""
    lists = host.on_host(host.full_lists(rows=1))
    sequence = mailbox.post(lists, 1)
    word = {
        "layer": lambda: behind.word("posts", "Post", "layer", sequence % SLOTS),
        "scale": lambda: behind.word("posts", "Post", "scale", sequence % SLOTS),
        "blocks": lambda: behind.word("requests", "Request", "blocks", sequence % SLOTS * host.rows),
        "count": lambda: behind.list_word(sequence, 0, 1, "count"),
        "last_fill": lambda: behind.list_word(sequence, 0, 1, "last_fill"),
        "page": lambda: behind.pages(sequence, 0, 1)[1],
    }[damage]()
    if damage == "blocks":
        word.value = 0  # as if the row had no blocks
    elif damage == "count":
        word.value -= 1
        behind.word("requests", "Request", "blocks", sequence % SLOTS * host.rows).value -= 1
    elif damage == "last_fill":
        word.value = 31
    else:
        word.value ^= 1
    with host.engine(mailbox):
        assert collected(mailbox, lists, sequence) == 1
    assert lists.outcome.tolist() == [DAMAGED]


@pytest.mark.parametrize("bit", [1, 5, 40, 62])
def test_a_worker_that_saw_a_wrong_number_at_the_bell_answers_the_next_post(
    mailbox: Mailbox, behind: Behind, host: Host, bit: int
) -> None:
    with host.engine(mailbox):
        for _ in range(4):
            lists = host.on_host(host.full_lists())
            sequence = mailbox.post(lists, 1)
            assert collected(mailbox, lists, sequence) == 0
        behind.word("bell", "Bell", "posted").value ^= 1 << bit
        time.sleep(0.05)  # the worker reads the wrong number
        for _ in range(4):
            lists = host.on_host(host.full_lists())
            assert collected(mailbox, lists, mailbox.post(lists, 1)) == 0


@pytest.mark.parametrize("threads", [1, 2, 0], ids=["one thread", "two threads", "external"])
@pytest.mark.parametrize("flags", [0, MASKS, VALUE_SUMS])
def test_a_reply_says_what_it_was_computed_from(threads: int, flags: int) -> None:
    host = Host(flags=flags)
    mailbox = Mailbox(host.geometry)
    behind = Behind(mailbox, host.geometry)
    for seed in range(4):
        some_lists = host.masked_lists if flags & MASKS else host.random_lists
        sent = some_lists(host.rows, host.max_blocks, seed)
        lists = host.sums(host.random_weights(sent, 1), sent) if flags == VALUE_SUMS else host.on_host(sent)
        with host.engine(mailbox, threads=threads) as engine:
            sequence = mailbox.post(lists, 1)
            if threads == 0:
                job = Job()
                while library().sh_engine_take(engine, 10**9, ctypes.byref(job)) == 0:
                    pass
                library().sh_engine_answer(engine, lists.out.data_ptr(), lists.lse.data_ptr())
            assert collected(mailbox, lists, sequence) == 0
        for row in range(lists.rows):
            assert behind.check(sequence, row).value == behind.check_of_request(sequence, row)


def test_a_reply_to_the_post_before_in_the_same_slot_is_never_taken_for_a_new_one(mailbox: Mailbox, host: Host) -> None:
    with host.engine(mailbox):
        for _ in range(SLOTS):
            lists = host.on_host(host.full_lists())
            assert collected(mailbox, lists, mailbox.post(lists, 1)) == 0
    lists = host.on_host(host.full_lists())  # no worker runs any more, but both slots hold complete replies
    assert collected(mailbox, lists, mailbox.post(lists, 1), timeout_s=0.01) == lists.rows
    assert (lists.outcome == LATE).all()


def test_a_reply_that_is_there_before_its_post_is_never_taken(mailbox: Mailbox, behind: Behind, host: Host) -> None:
    first = mailbox.post(host.on_host(host.full_lists()), 1)
    for row in range(2):
        behind.write_reply(first + SLOTS, row, generation=1)  # this damage looks right two posts later
    mailbox.post(host.on_host(host.full_lists()), 1)
    lists = host.on_host(host.full_lists())
    assert mailbox.post(lists, 1) == first + SLOTS
    assert collected(mailbox, lists, first + SLOTS, timeout_s=0.01) == lists.rows
    assert (lists.outcome == LATE).all()


def test_collecting_a_post_that_was_overwritten_serves_nothing_and_says_so(mailbox: Mailbox, host: Host) -> None:
    lists = host.on_host(host.full_lists())
    lists.lse.fill_(5.0)
    with host.engine(mailbox):  # so that the post that took the slot has an answer, which must not be merged
        first = mailbox.post(lists, 1)
        later = [host.on_host(host.full_lists(seed=seed)) for seed in (2, 3)]
        for newer in later:
            mailbox.post(newer, 1)
        assert eventually(lambda: mailbox.caught_up)
        lists.outcome.fill_(SERVED)  # as if these lists had been posted and served before
        assert collected(mailbox, lists, first) == lists.rows
        assert (lists.outcome == OVERWRITTEN).all()
        assert not lists.out.any() and (lists.lse == 5.0).all()
        for sequence, newer in enumerate(later, first + 1):
            assert collected(mailbox, newer, sequence) == 0, "the newest two posts are still there"


def test_a_post_of_another_number_or_size_than_the_slots_is_not_collected(mailbox: Mailbox, host: Host) -> None:
    """A reply with more rows than the caller's arrays would be written behind their ends."""
    sequence = mailbox.post(host.on_host(host.full_lists(rows=4)), 1)
    for number, rows in ((sequence, 2), (sequence + SLOTS, 4), (0, 4)):
        lists = host.on_host(host.full_lists(rows=rows))
        assert collected(mailbox, lists, number) == rows
        assert (lists.outcome == OVERWRITTEN).all()


def test_a_worker_that_answers_late_is_not_believed_once_its_slot_is_used_again(mailbox: Mailbox, host: Host) -> None:
    slow = host.full_lists(seed=3)
    job = Job()
    with host.engine(mailbox, threads=0) as engine:  # the test answers in place of the engine's threads
        given_up = host.on_host(slow)
        first = mailbox.post(given_up, 1)
        assert library().sh_engine_take(engine, int(PATIENCE_S * 1e6), ctypes.byref(job)) == 1
        assert collected(mailbox, given_up, first, timeout_s=0.01) == given_up.rows

        mailbox.post(host.on_host(slow), 1)
        waiting = host.on_host(host.full_lists(seed=4))
        third = mailbox.post(waiting, 2)  # has the slot of the first post
        wrong = host.computed_here(slow)
        library().sh_engine_answer(engine, *wrong.results)
        assert collected(mailbox, waiting, third, timeout_s=0.01) == waiting.rows
        assert (waiting.outcome == LATE).all()

        right = host.computed_here(host.full_lists(seed=4))
        for sequence in (first + 1, third):
            assert library().sh_engine_take(engine, int(PATIENCE_S * 1e6), ctypes.byref(job)) == 1
            assert job.sequence == sequence
            library().sh_engine_answer(engine, *right.results)
        assert collected(mailbox, waiting, third) == 0
        assert_same_bits(waiting, right)


def test_what_was_not_served_can_be_computed_here_without_touching_what_was(
    mailbox: Mailbox, behind: Behind, host: Host
) -> None:
    sent = host.full_lists(rows=3)
    lists = host.on_host(sent)
    sequence = mailbox.post(lists, 9)
    behind.write_reply(sequence, 1, generation=9)  # its results are zeros, which no computed row has
    assert collected(mailbox, lists, sequence, timeout_s=0.01) == 2
    host.local.attend(lists, lists.outcome)
    expected = host.computed_here(sent)
    for row in (0, 2):
        assert torch.equal(lists.out[row], expected.out[row]) and torch.equal(lists.lse[row], expected.lse[row])
    assert not lists.out[1].any() and not lists.lse[1].any()


# -- waiting -----------------------------------------------------------------------------------


def test_without_a_worker_everything_is_late_after_the_timeout(mailbox: Mailbox, host: Host) -> None:
    for timeout_s in (0.0, 0.02):
        lists = host.on_host(host.full_lists(rows=4))
        assert collected(mailbox, lists, mailbox.post(lists, 0), timeout_s) == 4
        assert (lists.outcome == LATE).all()
        assert not lists.out.any()


def test_a_wait_ends_early_when_the_worker_is_gone(mailbox: Mailbox, behind: Behind, host: Host) -> None:
    gone = ctypes.c_uint32(0)
    lists = host.on_host(host.full_lists())
    sequence = mailbox.post(lists, 0)
    missing: list[int] = []
    waiter = threading.Thread(target=lambda: missing.append(mailbox.collect(sequence, lists, 10 * PATIENCE_S, gone)))
    waiter.start()
    asleep = behind.word("client", "ClientLine", "waiting")
    assert eventually(lambda: asleep.value == 1)
    assert not missing
    gone.value = 1
    waiter.join(PATIENCE_S)
    assert missing == [2]
    assert (lists.outcome == LATE).all()


def test_what_a_worker_answered_before_it_went_still_counts(mailbox: Mailbox, behind: Behind, host: Host) -> None:
    lists = host.on_host(host.full_lists(rows=3))
    sequence = mailbox.post(lists, 4)
    behind.write_reply(sequence, 2, generation=4)  # the last row, because rows are answered in any order
    assert mailbox.collect(sequence, lists, PATIENCE_S, ctypes.c_uint32(1)) == 2
    assert lists.outcome.tolist() == [LATE, LATE, SERVED]


def test_a_worker_has_caught_up_when_everything_posted_is_completed(
    mailbox: Mailbox, behind: Behind, host: Host
) -> None:
    assert mailbox.caught_up, "nothing was posted"
    lists = [host.on_host(host.full_lists()) for _ in range(2)]
    sequences = [mailbox.post(one, 0) for one in lists]
    assert not mailbox.caught_up
    behind.word("worker", "WorkerLine", "completed").value = sequences[0]
    assert not mailbox.caught_up, "one of two"
    with host.engine(mailbox):  # continues after the last completed post
        assert collected(mailbox, lists[1], sequences[1]) == 0
        assert eventually(lambda: mailbox.caught_up)
    mailbox.post(lists[0], 0)
    assert not mailbox.caught_up


def test_a_worker_that_was_overtaken_catches_up_and_says_what_it_left_out(mailbox: Mailbox, host: Host) -> None:
    lists = [host.on_host(host.full_lists()) for _ in range(7)]
    for one in lists:
        sequence = mailbox.post(one, 0)
    stats = EngineStats()
    with host.engine(mailbox) as engine:
        assert collected(mailbox, lists[-1], sequence) == 0
        assert eventually(lambda: mailbox.caught_up)
        library().sh_engine_read_stats(engine, ctypes.byref(stats))
    assert (stats.posts, stats.abandoned_posts) == (SLOTS, 7 - SLOTS)


# -- lists out of bounds -----------------------------------------------------------------------


Changes = dict[tuple[int, int, int], int]


def _changed(lists: Lists, ids: Changes, fill: Changes) -> Lists:
    changed = Lists(lists.query, lists.ids.clone(), lists.fill.clone())
    for tensor, changes in ((changed.ids, ids), (changed.fill, fill)):
        for place, value in changes.items():
            tensor[place] = value
    return changed


@pytest.mark.parametrize(
    ("ids", "fill", "sentence"),
    [
        ({(1, 0, 1): 12}, {}, r"page 12 of 12 \(row 1, KV head 0\)"),
        ({(0, 1, 0): 1 << 40}, {}, r"page 1099511627776 of 12 \(row 0, KV head 1\)"),
        ({(0, 0, 0): -1}, {}, r"a block behind the end of its list \(row 0, KV head 0\)"),
        ({}, {(0, 1, 0): 31}, r"31 tokens in a block: 32, or 1 to 32 in the last one \(row 0, KV head 1\)"),
        ({}, {(0, 1, 1): 0}, r"0 tokens in a block: .* \(row 0, KV head 1\)"),
        ({}, {(1, 1, 1): 33}, r"33 tokens in a block: .* \(row 1, KV head 1\)"),
        ({}, {(1, 1, 1): (1 << 32) + 1}, r"4294967297 tokens in a block"),
        ({}, {(1, 1, 1): -5}, r"-5 tokens in a block"),
    ],
)
def test_a_list_out_of_bounds_is_refused_with_its_place_and_nothing_is_posted(
    mailbox: Mailbox, behind: Behind, host: Host, ids: Changes, fill: Changes, sentence: str
) -> None:
    wrong = host.on_host(_changed(host.full_lists(), ids, fill))
    with pytest.raises(NativeError, match=sentence):
        mailbox.post(wrong, 0)
    assert behind.word("bell", "Bell", "posted").value == mailbox.posted == 0
    with pytest.raises(NativeError, match=sentence):
        host.local.attend(wrong)


def test_more_than_fits_is_refused(mailbox: Mailbox, host: Host) -> None:
    with pytest.raises(NativeError, match="5 rows, at most 4 fit"):
        mailbox.post(host.on_host(host.full_lists(rows=5)), 0)
    with pytest.raises(NativeError, match="layer 2 of 2"):
        mailbox.post(host.on_host(host.full_lists(), layer=2), 0)
    shape = (1, host.kv_heads, 6)
    many = Lists(host.full_lists(rows=1).query, torch.zeros(shape, dtype=torch.int64), torch.full(shape, BLOCK_TOKENS))
    with pytest.raises(NativeError, match=r"6 blocks, at most 5 fit \(row 0, KV head 0\)"):
        mailbox.post(host.on_host(many), 0)
    assert mailbox.posted == 0


def test_what_is_written_past_the_client_is_refused_by_the_worker_and_harms_no_other_row(
    mailbox: Mailbox, behind: Behind, host: Host
) -> None:
    sent = host.full_lists(rows=3)
    lists = host.on_host(sent)
    sequence = mailbox.post(lists, 3)
    pages = layout_of(host.geometry).pages
    row = sequence % SLOTS * host.rows + 1
    place = mailbox.region.address + pages + row * host.kv_heads * host.max_blocks * 4
    ctypes.c_uint32.from_address(place).value = host.pages
    stats = EngineStats()
    with host.engine(mailbox) as engine:
        assert collected(mailbox, lists, sequence) == 1
        library().sh_engine_read_stats(engine, ctypes.byref(stats))
    assert lists.outcome.tolist() == [SERVED, DAMAGED, SERVED]
    assert stats.refused_rows == 1
    expected = host.computed_here(sent)
    assert torch.equal(lists.out[0], expected.out[0]) and torch.equal(lists.out[2], expected.out[2])
