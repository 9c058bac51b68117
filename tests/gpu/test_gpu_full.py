"""Policy ``full`` on the GPU, without SGLang: attention is exact, in device memory and in the host pool."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE
from test_gpu_scout import HEADS, LAYERS, LENGTHS, ROWS, SCALE, Decoding

from sglang_hybrid.engines.cuda.full import DeviceFull
from sglang_hybrid.engines.cuda.layers import DeviceLayer

STEPS = 70 if DEVICE == "cuda" else 3  # on a GPU every row crosses two block boundaries; here one row opens a block


class FullDecoding(Decoding):
    """``Decoding`` with the same prompts and the CUDA program of policy ``full``."""

    def __init__(self, blocks_per_row: int) -> None:
        self._blocks_per_row = blocks_per_row
        super().__init__(budget=9, interval=0)
        # the content of pages beyond their row's last token must not be read
        for pages, length in zip(self.pages, self.lengths.tolist(), strict=True):
            for part in (*self.keys, *self.values):
                part[pages[length // BLOCK_TOKENS], :, length % BLOCK_TOKENS :] = torch.nan
                part[pages[length // BLOCK_TOKENS + 1 :]] = torch.nan

    def program(self, layers: list[DeviceLayer], *_of_scout: object) -> DeviceFull:
        return DeviceFull(layers, self.shape, self._blocks_per_row)

    def begin(self) -> None:
        self.next_tokens()
        if self.scout.is_dense:
            self.scout.dense.begin_step(self.query.shape[1], self.lengths.tolist())

    def check(self) -> None:
        """Compare outputs with softmax in float64, and assert that the step's tokens are in the pool."""
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            for entry, length in enumerate(self.lengths.tolist()):
                keys, values = (
                    part[layer][self.pages[entry]].transpose(0, 1).flatten(1, 2)[:, :length].double()
                    for part in (self.keys, self.values)
                )
                new = self.new_keys[layer, entry].cpu(), self.new_values[layer, entry].cpu()
                assert torch.equal(keys[:, -1], new[0].double()) and torch.equal(values[:, -1], new[1].double())
                query = self.query[layer, entry].cpu().double().unflatten(0, (HEADS, -1))
                weights = torch.softmax(query @ keys.transpose(1, 2) * SCALE, dim=2)
                expected = (weights @ values).flatten(0, 1).float()
                found = self.out[layer, entry].cpu().float()
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert int(self.scout.refused) == 0


def record(decoding: FullDecoding) -> torch.cuda.CUDAGraph:
    decoding.scout.step.load_nothing()
    decoding.run(predicts=False)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.run(predicts=False)
    return graph


@pytest.mark.parametrize("recorded", [False, True] if DEVICE == "cuda" else [False])
@pytest.mark.parametrize("blocks_per_row", [0, 2])
def test_rows_that_do_not_fit_are_attended_in_the_host_pool(blocks_per_row: int, recorded: bool) -> None:
    decoding = FullDecoding(blocks_per_row)
    decoding.scout.reset_rows(decoding.rows)
    graph = record(decoding) if recorded else None
    for _ in range(STEPS):
        decoding.begin()
        if graph:
            graph.replay()
        else:
            decoding.run(predicts=False)
        decoding.check()


@pytest.mark.parametrize("recorded", [False, True] if DEVICE == "cuda" else [False])
def test_rows_move_to_the_host_pool_and_back(recorded: bool) -> None:
    decoding = FullDecoding(12)  # memory for 108 blocks, of which at most 64 are needed
    decoding.scout.reset_rows(decoding.rows)
    graphs = {}
    for whole in (True, False) if recorded else ():
        decoding.scout.is_dense = whole
        graphs[whole] = record(decoding)
    for whole in (True, False, True, False):
        decoding.scout.hold_rows(whole, count=decoding.query.shape[1])
        for _ in range(20 if DEVICE == "cuda" else 2):
            decoding.begin()
            if recorded:
                graphs[whole].replay()
            else:
                decoding.run(predicts=False)
            decoding.check()


def test_a_row_that_another_request_took_is_read_anew() -> None:
    decoding = FullDecoding(12)
    decoding.scout.reset_rows(decoding.rows)
    entry = 3
    for whole in (True, False):
        decoding.scout.hold_rows(whole)
        for _ in range(2):
            decoding.begin()
            decoding.run(predicts=False)
            decoding.check()
            for part in (*decoding.keys, *decoding.values):
                part[decoding.pages[entry, :8]] = part[decoding.pages[entry, :8]].flip(0)
            decoding.scout.reset_rows(torch.tensor([list(LENGTHS)[entry]], device=DEVICE))


def test_padding_is_neither_stored_nor_attended() -> None:
    decoding = FullDecoding(0)
    decoding.scout.reset_rows(decoding.rows)
    decoding.out.fill_(7)
    decoding.begin()
    before = [part.clone() for part in decoding.keys]
    decoding.run(predicts=False)
    decoding.check()
    assert not decoding.out[:, -1].any()  # padding's output is the program's buffer, initially zeros
    for now, part in zip(decoding.keys, before, strict=True):
        changed = ((now != part) & ~(now.isnan() & part.isnan())).flatten(1).any(dim=1)
        assert int(changed.sum()) == len(LENGTHS)  # one page per row


def test_nothing_is_allocated_for_selection() -> None:
    decoding = FullDecoding(2)
    program = decoding.scout
    assert program.dense.pages == 2 * ROWS
    assert not program.loads_initial_blocks and program.new_watch(None) is None
    kept = {name for name, value in vars(program).items() if not name.startswith("__")}
    assert kept == {"_layers", "_shape", "step", "_attention", "refused", "dense", "is_dense"}
