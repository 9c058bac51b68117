"""Codes of keys that the GPU writes, against the reference: quantised and whole keys, of pages and of new tokens."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.ops import reference_weights
from sglang_hybrid.ops.cuda.key_codes import QuantisedCodes
from sglang_hybrid.ops.cuda.step import Step

PAGES, HEADS, DIM = 7, 2, 64
UNTOUCHED = 0xA5


def some_codes(
    groups: int, centroids: int, shared: bool, dtype: torch.dtype, seed: int = 0, dim: int = DIM
) -> QuantisedCodes:
    """Return codes with random codebooks on a grid of 0.25, or, with ``groups`` 0, codes that are whole keys."""
    index_bytes = 1 if centroids <= 256 else 2
    code_bytes = groups * index_bytes if groups else dim * dtype.itemsize
    codes = torch.full((PAGES, HEADS, BLOCK_TOKENS, code_bytes), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    if not groups:
        return QuantisedCodes(codes, dtype, dim)
    books = torch.randn(HEADS, 1 if shared else groups, centroids, dim // groups, generator=seeded(seed))
    return QuantisedCodes(codes, dtype, dim, ((4 * books).round() / 4).to(DEVICE), groups, index_bytes)


def indices_of(to: QuantisedCodes) -> torch.Tensor:
    """Return the indices in codes: ``[pages, H, 32, groups]``."""
    return to.codes.cpu().view(torch.uint8 if to.index_bytes == 1 else torch.int16).long()


def books_of(to: QuantisedCodes) -> torch.Tensor:
    """Return the centroids of every group: ``[H, groups, C, part]``."""
    assert to.centroids is not None
    return to.centroids.cpu().expand(-1, to.groups, -1, -1)


def distances(to: QuantisedCodes, keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return squared distances of parts of keys ``[n, H, T, D]`` from centroids ``[n, H, T, groups]``, in float64."""
    head, group = torch.arange(HEADS)[:, None, None], torch.arange(to.groups)
    found = books_of(to).double()[head, group, indices]
    apart: torch.Tensor = (keys.double().unflatten(3, (to.groups, -1)) - found).square().sum(dim=4)
    return apart


def assert_nearest(to: QuantisedCodes, keys: torch.Tensor, indices: torch.Tensor) -> None:
    expected = reference_weights.nearest_centroids(keys.float(), books_of(to))
    assert (indices == expected).float().mean() > 0.95  # some centroids are equally near
    torch.testing.assert_close(distances(to, keys, indices), distances(to, keys, expected), rtol=1e-4, atol=1e-4)


CASES = [(16, 256, False), (8, 30, True), (32, 257, True), (64, 3, False), (1, 40, True), (4, 1, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "centroids", "shared"), CASES)
def test_parts_of_keys_become_the_indices_of_their_nearest_centroids(
    groups: int, centroids: int, shared: bool, dtype: torch.dtype
) -> None:
    to = some_codes(groups, centroids, shared, dtype, seed=groups)
    keys = torch.randn(4, HEADS, BLOCK_TOKENS, DIM, generator=seeded(3)).to(dtype)
    pages = torch.tensor([5, -1, 2, PAGES], dtype=torch.int32, device=DEVICE)  # two are outside the pool
    filled = torch.tensor([32, 32, 9, 32], dtype=torch.int32, device=DEVICE)
    to.encode_pages(keys.to(DEVICE), pages, filled)
    found = indices_of(to)
    assert_nearest(to, keys[:1], found[5:6])
    assert_nearest(to, keys[2:3, :, :9], found[2:3, :, :9])
    others = to.codes.cpu()
    others[5], others[2, :, :9] = UNTOUCHED, UNTOUCHED
    assert (others == UNTOUCHED).all()


def test_whole_keys_are_their_own_codes() -> None:
    to = some_codes(0, 0, False, torch.bfloat16)
    together = torch.randn(2 * BLOCK_TOKENS, 3, HEADS, DIM, generator=seeded(1)).to(DEVICE, torch.bfloat16)
    keys = together[:, 1].unflatten(0, (2, BLOCK_TOKENS)).transpose(1, 2)  # slices of a projection
    pages = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    to.encode_pages(keys, pages, torch.tensor([32, 1], dtype=torch.int32, device=DEVICE))
    codes = to.codes.view(torch.bfloat16)
    assert torch.equal(codes[3], keys[0])
    assert torch.equal(codes[0, :, :1], keys[1, :, :1]) and (to.codes[0, :, 1:] == UNTOUCHED).all()


@pytest.mark.parametrize("groups", [0, 16])
def test_a_steps_new_tokens_are_encoded_where_they_are_in_their_pages(groups: int) -> None:
    to = some_codes(groups, 50, False, torch.bfloat16)
    lengths = [1, 33, 64, 0, 97, 50]  # the fourth has no tokens, the fifth is beyond the table, the last is padding
    table = torch.tensor([[4, 1, 9], [0, 2, 9], [9, 3, 9], [4, 4, 4], [4, 4, 4], [5, 5, 5]])
    step = Step(
        table.int().to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.arange(6, dtype=torch.int32, device=DEVICE), torch.tensor([5], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    together = torch.randn(6, HEADS + 1, DIM, generator=seeded(2)).to(DEVICE, torch.bfloat16)
    keys = together[:, :HEADS]  # batch entries have a larger stride
    to.encode_step(step, keys)
    places = [(4, 0), (2, 0), (3, 31)]
    for entry, (page, token) in enumerate(places):
        key = keys[entry, :, None].cpu()[None]
        if groups:
            assert_nearest(to, key, indices_of(to)[page, :, token : token + 1][None])
        else:
            assert torch.equal(to.codes.view(torch.bfloat16)[page, :, token].cpu(), key[0, :, 0])
    others = to.codes.cpu()
    for page, token in places:
        others[page, :, token] = UNTOUCHED
    assert (others == UNTOUCHED).all()


def test_of_centroids_that_are_equally_near_the_first_counts() -> None:
    to = some_codes(8, 70, True, torch.bfloat16)
    assert to.centroids is not None
    to.centroids.fill_(0.5)
    keys = torch.randn(1, HEADS, BLOCK_TOKENS, DIM, generator=seeded(2)).to(DEVICE, torch.bfloat16)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    to.encode_pages(keys, one, one * BLOCK_TOKENS)
    assert not to.codes[1].any()


def test_codes_that_do_not_fit_their_codebooks_are_refused() -> None:
    to = some_codes(8, 70, True, torch.bfloat16)
    assert to.centroids is not None
    keys = torch.zeros(1, HEADS, BLOCK_TOKENS, DIM, dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for wrong in (
        QuantisedCodes(to.codes, to.dtype, DIM),
        QuantisedCodes(to.codes, to.dtype, DIM, to.centroids, 4, 1),
        QuantisedCodes(to.codes, to.dtype, DIM, to.centroids.expand(-1, 3, -1, -1), 8, 1),
    ):
        with pytest.raises(ValueError, match=r"fit|bytes"):
            wrong.encode_pages(keys, one, one)
