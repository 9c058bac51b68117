"""``same_bits``: chaos runs need every row's results to be bit-identical, whatever else is in its batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_oracle import seeded

from bench.chaos import same_bits
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.infinigen.policy import InfinigenPolicy

HEADS, GROUP, DIM, SCALE = 3, 3, 64, 0.125


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_a_product_rounds_a_row_the_same_wherever_it_stands(rows: int) -> None:
    x, weight = normal(64, 576), normal(960, 576, seed=1)
    whole = same_bits.linear(x, weight)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=2e-4)  # sums of 576 terms
    for first in (0, 5, 64 - rows):
        assert torch.equal(same_bits.linear(x[first : first + rows], weight), whole[first : first + rows])
        assert torch.equal(
            same_bits.matmul(x[first : first + rows], weight.T), same_bits.matmul(x, weight.T)[first:][:rows]
        )


@pytest.mark.parametrize("cut", [32, 64, 288])
def test_a_prompt_has_the_same_attention_in_chunks_and_as_a_whole(cut: int) -> None:
    query, key, value = (
        normal(300, HEADS * GROUP, DIM),
        normal(HEADS, 300, DIM, seed=1),
        normal(HEADS, 300, DIM, seed=2),
    )
    whole = same_bits.attend_prefill(query, key, value, SCALE)
    torch.testing.assert_close(whole, reference.attend_prefill(query, key, value, SCALE))
    assert torch.equal(same_bits.attend_prefill(query[:cut], key[:, :cut], value[:, :cut], SCALE), whole[:cut])
    assert torch.equal(same_bits.attend_prefill(query[cut:], key, value, SCALE), whole[cut:])


def test_decode_gives_a_row_the_same_bits_alone_and_beside_longer_ones() -> None:
    pages = 120
    keys, values = normal(pages, HEADS, 32, DIM), normal(pages, HEADS, 32, DIM, seed=1)
    digests = reference.minmax_digest(keys, torch.full((pages,), 32))
    cache = LayerCache(keys, values, digests)
    query, counts = normal(3, HEADS * GROUP, DIM, seed=2), torch.tensor([5, 90, 40])
    table = torch.stack([torch.randperm(pages, generator=seeded(n))[:90] for n in range(3)])
    ids = table[:, None, :7].expand(-1, HEADS, -1).clone()
    ids[0, :, 3:] = reference.NO_BLOCK
    fill = torch.where(ids == reference.NO_BLOCK, 0, 32)

    def of(rows: slice, width: int, listed: int) -> list[torch.Tensor]:
        logits = same_bits.estimates(cache, query[rows], table[rows, :width], 0.5, SCALE)
        scores = same_bits.block_scores(reference.without_tail(logits, counts[rows]), counts[rows], SCALE)
        attended = same_bits.attend_blocks(
            query[rows], keys, values, ids[rows, :, :listed], fill[rows, :, :listed], SCALE
        )
        return [scores, *attended, *same_bits.merge(*attended, *attended)]

    together, alone = of(slice(0, 3), 90, 7), of(slice(0, 1), 5, 3)
    assert torch.equal(together[0][:1, :, :5], alone[0])
    for one, other in zip(together[1:], alone[1:], strict=True):
        assert torch.equal(one[:1], other)


def test_tokens_of_blocks_and_partial_keys_give_a_row_the_same_bits() -> None:
    """Both are what policy infinigen computes: attention over tokens of blocks, selection by partial keys."""
    pages, columns = 120, 8
    keys, values = normal(pages, HEADS, 32, DIM), normal(pages, HEADS, 32, DIM, seed=1)
    partial = PartialKeys([torch.eye(DIM).expand(HEADS, -1, -1)], columns, torch.bfloat16)
    policy = InfinigenPolicy(HybridConfig(policy="infinigen"), partial)
    cache = LayerCache(keys, values, None, 0, None, partial.encode(0, keys))
    query, lengths = normal(3, HEADS * GROUP, DIM, seed=2), torch.tensor([5 * 32, 90 * 32, 40 * 32])
    table = torch.stack([torch.randperm(pages, generator=seeded(n))[:90] for n in range(3)])
    masks = torch.randint(1, 2**31 - 1, (3, HEADS, 5), generator=seeded(7), dtype=torch.int32)

    def of(rows: slice, width: int) -> list[torch.Tensor]:
        batch = DecodeBatch(table[rows, :width], lengths[rows], [], torch.arange(3)[rows], [])
        ids = table[rows, None, :5].expand(-1, HEADS, -1)
        attended = same_bits.attend_blocks(
            query[rows], keys, values, ids, torch.full_like(ids, 32), SCALE, masks=masks[rows]
        )
        return [same_bits.speculated(policy, query[rows], cache, batch, SCALE), *attended]

    together, alone = of(slice(0, 3), 90), of(slice(0, 1), 5)
    assert torch.equal(together[0][:1, ..., : 5 * 32], alone[0])
    for one, other in zip(together[1:], alone[1:], strict=True):
        assert torch.equal(one[:1], other)
    whole = reference.attend_blocks(
        query[:1], keys, values, table[:1, None, :5].expand(-1, HEADS, -1), torch.full((1, HEADS, 5), 32), SCALE,
        masks=masks[:1],
    )  # fmt: skip
    torch.testing.assert_close(alone[1], whole[0])
