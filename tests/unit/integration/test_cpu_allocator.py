"""The page allocator for hosts without a GPU, compared with a plain-Python model of an allocator."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def make_allocator() -> Make:
    # imported in a fixture, because importing SGLang takes long, and other tests are collected without it
    from sglang_hybrid.integration.cpu_allocator import CpuPagedAllocator

    def make(pages: int, page_size: int, need_sort: bool = False) -> CpuPagedAllocator:
        return CpuPagedAllocator(
            pages * page_size,
            page_size=page_size,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=None,
            need_sort=need_sort,
        )

    return make


@dataclass
class Host:
    """An allocator and the slots that it gave to each live request. Every step checks all rules of allocation."""

    allocator: Any
    pages: int
    page_size: int
    requests: dict[int, list[int]] = field(default_factory=dict)

    def live_pages(self) -> list[int]:
        """Return the pages of all requests; a page that several requests have is listed for each of them."""
        return [page for slots in self.requests.values() for page in {slot // self.page_size for slot in slots}]

    def free_pages(self) -> list[int]:
        return sorted(self.allocator.get_all_free_pages().tolist())

    def extend(self, new_tokens: dict[int, int]) -> None:
        """Give each named request its next tokens, in one batch."""
        before = [len(self.requests.get(name, [])) for name in new_tokens]
        after = [length + new for length, new in zip(before, new_tokens.values(), strict=True)]
        prefix_lens, seq_lens = torch.tensor(before), torch.tensor(after)
        last = torch.tensor([self.requests.get(name, [-1])[-1] for name in new_tokens])
        self.account(
            new_tokens,
            lambda: self.allocator.alloc_extend(
                prefix_lens, prefix_lens.clone(), seq_lens, seq_lens.clone(), last, sum(new_tokens.values())
            ),
        )

    def decode(self, names: list[int]) -> None:
        """Allocate one more token for each named request."""
        seq_lens = torch.tensor([len(self.requests[name]) + 1 for name in names])
        last = torch.tensor([self.requests[name][-1] for name in names])
        self.account(dict.fromkeys(names, 1), lambda: self.allocator.alloc_decode(seq_lens, seq_lens.clone(), last))

    def account(self, new_tokens: dict[int, int], allocate: Callable[[], torch.Tensor | None]) -> None:
        needed = 0
        for name, new in new_tokens.items():
            length = len(self.requests.get(name, []))
            needed += -(-(length + new) // self.page_size) - -(-length // self.page_size)
        free = self.free_pages()
        slots = allocate()
        if needed > len(free):
            assert slots is None, "out of pages"
            assert self.free_pages() == free, "a refusal changes nothing"
        else:
            assert slots is not None and slots.dtype == torch.int64
            self.take(new_tokens, slots.tolist())
        self.check()

    def take(self, new_tokens: dict[int, int], slots: list[int]) -> None:
        """Give slots to requests in order. Check that a page starts at its first slot and is filled slot by slot."""
        assert len(slots) == sum(new_tokens.values())
        started = []
        for name, new in new_tokens.items():
            own = self.requests.setdefault(name, [])
            for slot in slots[:new]:
                if len(own) % self.page_size:
                    assert slot == own[-1] + 1
                else:
                    assert slot % self.page_size == 0
                    started.append(slot // self.page_size)
                own.append(slot)
            slots = slots[new:]
        if self.allocator.need_sort:
            assert started == sorted(started), "runs of neighbouring pages, for transfers"

    def free(self, name: int) -> None:
        self.allocator.free(torch.tensor(self.requests.pop(name)))
        self.check()

    def free_from(self, name: int, first_page: int) -> None:
        """Free all but the first pages of a request, as when SGLang retracts a request to its cached prefix."""
        keep = first_page * self.page_size
        own = self.requests[name]
        self.allocator.free(torch.tensor(own[keep:], dtype=torch.int64))
        self.requests[name] = own[:keep]
        self.check()

    def check(self) -> None:
        live = self.live_pages()
        assert sorted(live + self.free_pages()) == list(range(1, self.pages + 1)), "each page is free or of one request"
        assert self.allocator.available_size() == (self.pages - len(live)) * self.page_size


@pytest.mark.parametrize("need_sort", [False, True])
@given(data=st.data())
def test_pages_belong_to_one_request_are_filled_in_order_and_all_come_back(
    make_allocator: Make, need_sort: bool, data: st.DataObject
) -> None:
    page_size, pages = data.draw(st.sampled_from([2, 4, 32])), data.draw(st.integers(1, 12))
    host = Host(make_allocator(pages, page_size, need_sort), pages, page_size)
    names, tokens = st.integers(0, 4), st.integers(1, 3 * page_size + 1)
    for _ in range(data.draw(st.integers(1, 15))):
        step = data.draw(st.sampled_from(["extend", "extend", "decode", "decode", "free", "free_from"]))
        live = sorted(host.requests)
        if step == "extend" or not live:
            host.extend(data.draw(st.dictionaries(names, tokens, min_size=1, max_size=3)))
        elif step == "decode":
            host.decode(data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True)))
        elif step == "free":
            host.free(data.draw(st.sampled_from(live)))
        else:
            name = data.draw(st.sampled_from(live))
            whole = len(host.requests[name]) // page_size
            if whole:
                host.free_from(name, data.draw(st.integers(1, whole)))
    for name in sorted(host.requests):
        host.free(name)
    assert host.allocator.available_size() == pages * page_size


@pytest.mark.parametrize("need_sort", [False, True])
def test_the_last_page_can_be_had_and_then_there_is_none(make_allocator: Make, need_sort: bool) -> None:
    host = Host(make_allocator(3, 4, need_sort), 3, 4)
    host.extend({0: 9})
    assert host.allocator.available_size() == 0
    host.decode([0])  # the request's last page is not full
    host.extend({0: 2})
    assert len(host.requests[0]) == 12
    host.decode([0])
    host.extend({1: 1})
    assert len(host.requests[0]) == 12 and 1 not in host.requests, "both were refused"
    host.free(0)
    host.extend({1: 12})
    assert len(host.requests[1]) == 12


def test_a_batch_gets_all_its_pages_or_none(make_allocator: Make) -> None:
    host = Host(make_allocator(3, 4), 3, 4)
    host.extend({0: 4, 1: 4, 2: 5})
    assert host.requests == {} and host.allocator.available_size() == 12


def test_pages_freed_in_any_order_are_handed_out_sorted_when_transfers_want_it(make_allocator: Make) -> None:
    host = Host(make_allocator(4, 2, need_sort=True), 4, 2)
    host.extend({0: 2, 1: 2, 2: 2, 3: 2})
    for name in (2, 0, 3, 1):
        host.free(name)
    host.extend({4: 8})
    assert host.requests[4] == list(range(2, 10))


def test_slot_0_is_never_handed_out(make_allocator: Make) -> None:
    # SGLang writes padding tokens to slot 0
    host = Host(make_allocator(5, 4), 5, 4)
    host.extend({0: 20})
    assert min(host.requests[0]) == 4


def test_arguments_of_later_sglang_versions_are_accepted(make_allocator: Make) -> None:
    allocator = make_allocator(2, 4)
    lengths = torch.tensor([3])
    slots = allocator.alloc_extend(
        torch.tensor([0]), torch.tensor([0]), lengths, lengths, torch.tensor([-1]), 3, num_new_pages=1, something=None
    )
    assert slots.tolist() == [4, 5, 6]
    assert allocator.alloc_decode(lengths + 1, lengths + 1, slots[-1:], something=None).tolist() == [7]
