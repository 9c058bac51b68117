"""What stands for blocks that are left out: bias, weight, and the mean of a row's values, against softmax attention."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.ops import reference

T, HEADS, GROUP, DIM, SINK, RECENT = 32, 2, 3, 16, 1, 2


@pytest.mark.parametrize("mean_share", [0.0, 0.5, 1.0])
def test_masses_of_near_blocks_and_candidates_keep_their_proportion(mean_share: float) -> None:
    """With exact shares, candidates and the mean together weigh what all candidates would."""
    share = torch.tensor([[[0.0, -0.5, -3.0]]])
    bias, weight = reference.left_out(share, mean_share)
    torch.testing.assert_close((1 + weight) / bias.exp(), 1 / share.exp())


def test_the_mean_stands_for_its_part_of_what_is_left_out() -> None:
    _, weight = reference.left_out(torch.tensor([-0.7]), 0.25)
    rest = 1 / torch.tensor(-0.7).exp() - 1
    # of the mass that is left out a quarter is the mean's
    part = weight / (1 + weight)
    assert float(part) == pytest.approx(0.25 * float(rest / (1 + rest)))


def test_nothing_attended_is_a_finite_weight() -> None:
    bias, weight = reference.left_out(torch.tensor([-1e9]))
    assert torch.isfinite(bias).all() and float(weight) == pytest.approx(1.0)


def test_blocks_with_equal_values_are_attended_as_if_none_was_left_out() -> None:
    """If all candidates have the same keys, and values are their mean, the output is that of full attention."""
    random = torch.Generator().manual_seed(1)
    blocks = 40
    keys = torch.randn(1, HEADS, T, DIM, generator=random).repeat(blocks, 1, 1, 1)
    values = torch.randn(1, HEADS, T, DIM, generator=random).mean(dim=2, keepdim=True).expand(1, HEADS, T, DIM)
    values = values.repeat(blocks, 1, 1, 1)
    values[0] = torch.randn(HEADS, T, DIM, generator=random)
    query = torch.randn(1, HEADS * GROUP, DIM, generator=random)
    pages, counts = torch.arange(blocks)[None], torch.tensor([blocks])

    def attended(positions: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        ids = positions.expand(1, HEADS, -1)
        fill = reference.block_fill(ids, torch.tensor([blocks * T]), T)
        return reference.attend_blocks(query, keys, values, ids, fill, DIM**-0.5, bias)

    exact = attended(torch.arange(blocks)[None, None])[0]
    chosen = torch.tensor([0, 5, 9, blocks - 3, blocks - 2, blocks - 1])
    is_attended = reference.is_listed(chosen.expand(1, HEADS, -1), blocks)
    logits = torch.zeros(1, HEADS, GROUP, blocks)  # all blocks are equal
    share = reference.attended_share(logits, is_attended, counts, 1.0, SINK, RECENT)
    bias, weight = reference.left_out(share)
    near = reference.is_forced(chosen.expand(1, HEADS, -1), counts, SINK, RECENT)
    of_near = bias[..., None] * near[:, :, None, :]
    out, lse = attended(chosen[None, None], of_near)
    near_lse = attended(chosen[near[0, 0]][None, None], bias[..., None].expand(-1, -1, -1, int(near[0, 0].sum())))[1]
    means = reference.sampled_mean(values, pages, counts, SINK, RECENT)
    torch.testing.assert_close(reference.with_left_out(out, lse, near_lse, weight, means), exact, rtol=1e-4, atol=1e-5)


def test_samples_are_full_blocks_of_the_row_between_sink_and_recent_ones() -> None:
    values = torch.arange(90.0)[:, None, None, None].expand(-1, 1, T, 2).contiguous()
    pages = torch.stack((torch.arange(80), torch.arange(10, 90)))
    means = reference.sampled_mean(values, pages, torch.tensor([80, 9]), SINK, RECENT)
    first = [SINK + i * 76 // 32 for i in range(32)]
    assert means[0].flatten().tolist() == pytest.approx([sum(first) / 32] * 2)
    # a short row: all of its candidates, blocks 1 to 5
    assert means[1].flatten().tolist() == pytest.approx([10 + 3.0] * 2)


def test_a_mean_is_computed_again_whenever_the_row_has_doubled() -> None:
    lengths = torch.tensor([1, 2, 257, 513, 514, 1025, 1537, 2049, 65537])
    assert lengths[reference.is_sampled_again(lengths)].tolist() == [513, 1025, 2049, 65537]


def test_a_row_without_candidates_has_the_mean_zero() -> None:
    values = torch.ones(4, 1, T, 2)
    assert not reference.sampled_mean(values, torch.arange(4)[None], torch.tensor([3]), SINK, RECENT).any()
