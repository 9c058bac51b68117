"""Decoding of two layers with policy ``scout`` on the GPU, without SGLang: contents of slots, selection and outputs."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import bits_of, later

from sglang_hybrid.blocks import compact_bytes
from sglang_hybrid.core import LayerCache
from sglang_hybrid.engines.cuda.decode import DeviceScout
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.settings import ScoutSettings, WholeSteps
from sglang_hybrid.memory.sketches import LayerSketch
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.structs import EngineOptions, Geometry
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests, digest_pages
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import TOTALS
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.protocol.region import SharedRegion

LAYERS, HEADS, GROUP, DIM, CHANNELS = 2, 2, 3, 64, 32  # two layers: after a step the lanes' buffers have data of both
ROWS, MAX_BLOCKS, PAGES = 9, 40, 150
LENGTHS = {3: 650, 1: 33, 4: 96, 2: 1000}  # tokens of each row's prompt
DTYPE, SCALE = torch.bfloat16, DIM**-0.5
SINK, RECENT = 1, 2
STEPS = 40 if DEVICE == "cuda" else 4  # the third row opens a block in its first step


class Decoding:
    """A pool that holds prompts, rows for them, and decode steps with random tokens."""

    def __init__(
        self, budget: int, interval: int, slots: int | None = None, worker: bool = False, share: float = 0.0,
        min_miss_score: float | None = None, compact: bool = False, early: int = 0,
        whole: WholeSteps | None = None, whole_score: float = -math.inf, pool: torch.dtype = DTYPE,
        coded: bool = False,
    ) -> None:  # fmt: skip
        """Create pool, digests and the CUDA program.

        ``min_miss_score``: if given, all blocks with this score or more are misses. ``pool``: dtype of keys and values.
        ``compact``: digests are compact. ``whole``: steps in which rows attend to all blocks with a score of at least
        ``whole_score``. ``coded``: slots keep codes; all keys and values are numbers that codes stand for.
        """
        self.random = seeded(3)
        exponents = torch.randint(-5, -2, (2, HEADS, DIM), generator=self.random)
        self.code_steps = 2.0**exponents if coded else None
        self._settled: list[object] = []
        shape = (PAGES, HEADS, BLOCK_TOKENS, DIM)
        size = math.prod(shape) * pool.itemsize
        region = SharedRegion(SharedRegion.size_for(*[size] * 2 * LAYERS))
        self.keys = [region.take(shape, pool) for _ in range(LAYERS)]
        self.values = [region.take(shape, pool) for _ in range(LAYERS)]
        self.region, registered = region, host_memory.RegisteredRegion(region)
        order = torch.rand(HEADS, DIM, generator=self.random).argsort(dim=1)
        channels = order[:, :CHANNELS].contiguous().to(DEVICE)
        layers = []
        for keys, values in zip(self.keys, self.values, strict=True):
            keys.copy_(self.rounded(0, self.blocks(PAGES)))
            values.copy_(self.rounded(1, torch.randn(shape, generator=self.random)))
            codes = torch.zeros(PAGES, HEADS, BLOCK_TOKENS, CHANNELS // 2, dtype=torch.uint8, device=DEVICE)
            if compact:
                size = compact_bytes(DIM, CHANNELS)
                empty = torch.zeros(PAGES, HEADS, size, dtype=torch.uint8, device=DEVICE)
                digests = LayerDigests(empty, codes, channels, (DTYPE, DIM), pool)
            else:
                empty = torch.zeros(PAGES, HEADS, 2, DIM, dtype=DTYPE, device=DEVICE)
                digests = LayerDigests(empty, codes, channels, pool=pool)
            every = torch.arange(PAGES, dtype=torch.int32, device=DEVICE)
            full, on_device = torch.full_like(every, BLOCK_TOKENS), keys.to(DEVICE)
            self._settled.append((every, full, on_device))
            digest_pages(digests, on_device, every, full)
            steps = None if self.code_steps is None else reference.with_reciprocals(self.code_steps.to(DEVICE))
            layers.append(DeviceLayer(HostPool(registered, keys, values), digests, steps=steps))
        self.geometry = Geometry(
            ROWS, HEADS, GROUP, DIM, code_of(pool, DTYPE), budget, LAYERS, PAGES,
            self.keys[0].data_ptr() - region.address,
            self.values[0].data_ptr() - region.address, self.keys[1].data_ptr() - self.keys[0].data_ptr(), region.size,
        )  # fmt: skip
        self.mailbox = Mailbox(self.geometry) if worker else None
        client = DeviceMailboxClient(self.geometry, DEVICE) if worker else None
        if client:
            client.attach(self.mailbox)
        settings = ScoutSettings(
            budget=budget, slots=slots or budget, sink=SINK, recent=RECENT, bonus=(0.5,) * LAYERS,
            min_miss_score=(-math.inf if min_miss_score is None else min_miss_score,) * LAYERS,
            any_block=(min_miss_score is not None,) * LAYERS,
            gather_share=share, deadline_s=20.0, early_recalls=early, whole=whole,
            whole_score=whole_score, has_codes=coded,
        )  # fmt: skip
        self.digests = [layer.digests.digests for layer in layers]
        self.shape = DeviceShape(ROWS, ROWS, MAX_BLOCKS, HEADS, GROUP, DIM, PAGES)
        self.scout = self.program(layers, settings, interval, client)
        self.rows = torch.tensor(list(LENGTHS), device=DEVICE)
        self.lengths = torch.tensor(list(LENGTHS.values()))
        self.pages = torch.randperm(PAGES, generator=self.random)[: len(LENGTHS) * 36].view(len(LENGTHS), 36)
        self.req_to_token = torch.zeros(ROWS, MAX_BLOCKS * BLOCK_TOKENS, dtype=torch.int32)
        for row, pages in zip(LENGTHS, self.pages, strict=True):
            tokens = pages[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
            self.req_to_token[row, : tokens.numel()] = tokens.flatten()
        self.req_to_token = self.req_to_token.to(DEVICE)
        entries = (LAYERS, len(LENGTHS) + 1)  # the last entry is padding
        self.query = torch.zeros(*entries, HEADS * GROUP, DIM, dtype=DTYPE, device=DEVICE)
        self.predicted = self.query  # tests may set other predicted queries
        self.new_keys, self.new_values = torch.zeros(2, *entries, HEADS, DIM, dtype=DTYPE, device=DEVICE)
        self.out = torch.zeros_like(self.query)
        self.ends = False  # whether `run` calls end_step after the last layer

    def program(
        self, layers: list[DeviceLayer], settings: ScoutSettings, interval: int, client: DeviceMailboxClient | None
    ) -> Any:
        return DeviceScout(layers, self.shape, settings, (interval,) * LAYERS, client)

    def blocks(self, pages: int) -> torch.Tensor:
        keys = torch.randn(pages, HEADS, BLOCK_TOKENS, DIM, generator=self.random)
        return (keys + 1.5 * torch.randn(pages, HEADS, 1, DIM, generator=self.random)).to(DTYPE)

    def rounded(self, part: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return keys (``part`` 0) or values (1) ``[..., KV heads, tokens, dim]``, rounded if slots keep codes."""
        if self.code_steps is None:
            return tokens
        steps = self.code_steps[part][:, None]
        levels = (tokens.float() / steps).round().clamp(-reference.CODE_MOST, reference.CODE_MOST)
        levels[..., 0] = reference.CODE_MOST  # so every token has the factor 1
        return (levels * steps).to(tokens.dtype)

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        if self.mailbox is None:
            yield
            return
        options = EngineOptions(2, 1, 8, 5_000_000, None, None)
        engine = checked(
            library().sh_engine_start, self.mailbox.region.address, self.region.address,
            ctypes.byref(self.geometry), ctypes.byref(options),
        )  # fmt: skip
        try:
            yield
        finally:
            torch.cuda.synchronize()
            library().sh_engine_stop(engine)

    def load_initial_blocks(self) -> None:
        self.scout.reset_rows(self.rows, prefilled=True)
        table = torch.zeros(len(LENGTHS), MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
        table[:, : self.pages.shape[1]] = self.pages.to(DEVICE)
        step = Step(table, self.lengths.int().to(DEVICE) + 1, self.rows.int())
        for layer in range(LAYERS):
            query = torch.randn(len(LENGTHS), HEADS * GROUP, DIM, generator=self.random).to(DEVICE, DTYPE)
            self.scout.load_initial_blocks(layer, step, query, SCALE)
            self._settled.append((step, query))  # keeps tensors alive: the emulation runs launches later than a GPU

    def next_tokens(self) -> None:
        for part, drift in ((self.query, 0.3), (self.new_keys, 1.0), (self.new_values, 1.0)):
            noise = torch.randn(part.shape, generator=self.random).to(DEVICE, DTYPE)
            part.copy_(part * math.sqrt(1 - drift**2) + drift * noise)
        for number, part in enumerate((self.new_keys, self.new_values)):
            part.copy_(self.rounded(number, part.unsqueeze(3).cpu()).squeeze(3))
        self.lengths += 1
        self.load_rows()

    def load_rows(self) -> None:
        count = self.query.shape[1]
        lengths, rows = torch.ones(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        lengths[:-1], rows[:-1] = self.lengths, self.rows.cpu()
        of_step = rows.to(DEVICE), lengths.to(DEVICE)
        self._settled.append(of_step)
        self.scout.step.load(self.req_to_token, *of_step, count - 1)

    def run(self, predicts: bool, begins: bool = True) -> None:
        """Launch the layers of a step, or record them if the stream is captured. ``begins``: call begin_step first."""
        scout, count = self.scout, self.query.shape[1]
        if begins:
            scout.begin_step()
        for layer in range(LAYERS):
            if predicts:
                with scout.scout_lane():
                    for number in (0, 1) if layer == 0 else ():
                        later(partial(scout.query_ahead(number, count).copy_, self.predicted[number]))
                        scout.ahead(number, count, SCALE)
            out = scout.decode(layer, self.query[layer], self.new_keys[layer], self.new_values[layer], SCALE)
            later(partial(self.out[layer].copy_, out))
        if self.ends:
            scout.end_step()

    def steps(self, predicts: bool, recorded: bool) -> Iterator[None]:
        """Run decode steps, launched one by one or as a replayed graph. Yield after each, for the caller's checks."""
        graph: torch.cuda.CUDAGraph | None = None
        if recorded:
            self.scout.step.load_nothing()
            self.run(predicts)  # CUDA loads the kernels at their first launch
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run(predicts, begins=False)  # SGLang announces one step, runs it and then records it
        for _ in range(STEPS):
            self.next_tokens()
            if graph is None:
                self.run(predicts)
            else:
                graph.replay()
            torch.cuda.synchronize()
            yield

    def attended(self, layer: int, everything: bool) -> torch.Tensor:
        """Return the positions that each (row, KV head) attends to, -1 for none."""
        counts = -(-self.lengths // BLOCK_TOKENS)
        if everything:
            every = torch.arange(MAX_BLOCKS).expand(len(LENGTHS), HEADS, -1)
            return every.masked_fill(every >= counts[:, None, None], reference.NO_BLOCK)
        held = self.held(layer)
        misses = self.misses(layer)
        assert not (self.is_held(held) & self.is_held(misses)).any(), "a miss is in a slot"
        return torch.cat((held, misses), dim=2)

    @staticmethod
    def is_held(positions: torch.Tensor) -> torch.Tensor:
        return reference.is_listed(positions, MAX_BLOCKS)

    def misses(self, layer: int) -> torch.Tensor:
        """Return the positions of misses, which worker or GPU attend to in the pool: ``[rows, KV heads, n]``."""
        positions: torch.Tensor = self.scout._lanes[layer % 2].misses(self.query.shape[1]).positions
        return positions[:-1].cpu().long()

    def gathered(self, layer: int) -> torch.Tensor:
        """Return which blocks this step has gathered: bool ``[rows, KV heads, blocks]``."""
        plan, slots = self.scout._lanes[layer % 2].gathered, self.scout.slots.positions(layer).shape[2]
        found = torch.zeros(ROWS, HEADS, MAX_BLOCKS, dtype=torch.bool)
        if plan:
            count = int(plan.count)
            owners = plan.destinations[:count].cpu().long() // slots
            found.view(-1, MAX_BLOCKS)[owners, plan.positions[:count].cpu().long()] = True
        return found[self.rows.cpu()]

    def held(self, layer: int) -> torch.Tensor:
        """Return the positions of the blocks in slots: ``[rows, KV heads, slots]``."""
        held: torch.Tensor = self.scout.slots.positions(layer)[self.rows].cpu().long()
        counts = -(-self.lengths // BLOCK_TOKENS)
        return held.masked_fill(held >= counts[:, None, None], reference.NO_BLOCK)

    def expected(self, layer: int, everything: bool) -> torch.Tensor:
        positions = self.attended(layer, everything)
        ids = reference.block_ids(positions, self.pages)
        fill = reference.block_fill(positions, self.lengths, BLOCK_TOKENS)
        query = self.query[layer, :-1].cpu().float()
        keys, values = self.keys[layer].float(), self.values[layer].float()
        bias = None if everything else self.bias(layer, query, positions)
        return reference.attend_blocks(query, keys, values, ids, fill, SCALE, bias)[0]

    def expected_of_worth(self, layer: int, least: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expected outputs of rows that attend to blocks in slots and to blocks that score at least ``least``.

        Also return which blocks are left out: bool ``[rows, KV heads, blocks]``. Scores, blocks in slots and the near
        bias are read from the kernels' buffers, because rounding and the predicted query affect them. Scores are
        compared with the reference first.
        """
        query = self.query[layer, :-1].cpu().float()
        logits, counts = self.logits(layer, query)
        scores = self.scout._scores[layer][self.rows].cpu()
        torch.testing.assert_close(scores, reference.block_scores(logits, counts, SCALE), rtol=1e-3, atol=0.02)
        every = self.attended(layer, everything=True)
        always = reference.is_forced(every, counts, SINK, RECENT)
        held = bits_of(self.scout._lanes[layer % 2].held(len(self.rows)), MAX_BLOCKS).cpu()
        left_out = ~always & ~held & (scores < least) & (every != reference.NO_BLOCK)
        positions = every.masked_fill(left_out, reference.NO_BLOCK)
        ids, fill = (
            reference.block_ids(positions, self.pages),
            reference.block_fill(positions, self.lengths, BLOCK_TOKENS),
        )
        keys, values = self.keys[layer].float(), self.values[layer].float()
        bias = self.scout._near_bias[layer][self.rows].cpu()[..., None] * always[:, :, None, :]
        return reference.attend_blocks(query, keys, values, ids, fill, SCALE, bias)[0], left_out

    def bias(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the near bias of listed blocks ``[rows, KV heads, group, n]``: 0 except for sink, recent and tail."""
        logits, counts = self.logits(layer, query)
        bias = reference.near_bias(logits, self.is_held(positions), counts, SCALE, SINK, RECENT)
        return bias[..., None] * reference.is_forced(positions, counts, SINK, RECENT)[:, :, None, :]

    def logits(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return estimates ``[rows, KV heads, group, blocks]`` without the tail, and each row's number of blocks."""
        counts, summaries = -(-self.lengths // BLOCK_TOKENS), self.scout._layers[layer].digests
        sketch = LayerSketch(summaries.codes.cpu(), summaries.channels.cpu())
        cache = LayerCache(self.keys[layer], self.values[layer], summaries.digests.cpu(), layer, sketch)
        pages = torch.nn.functional.pad(self.pages, (0, MAX_BLOCKS - self.pages.shape[1]))
        return reference.without_tail(cache.estimates(query, pages, 0.0, SCALE), counts), counts

    def check_slots(self) -> None:
        token = torch.arange(BLOCK_TOKENS)
        entry, head = torch.arange(len(LENGTHS))[:, None, None], torch.arange(HEADS)[:, None]
        for layer in range(LAYERS):
            positions = self.scout.slots.positions(layer)[self.rows].cpu().long()
            tokens = self.lengths[:, None, None] - positions * BLOCK_TOKENS
            holds = (positions >= 0) & (tokens > 0)
            counts = torch.zeros(len(LENGTHS), HEADS, MAX_BLOCKS, dtype=torch.int64)
            counts.scatter_add_(2, positions.clamp(min=0), holds.long())
            assert counts.max() <= 1, "a block is in two slots"
            valid = holds[..., None] & (token < tokens[..., None])
            pages = self.pages[entry, positions.clamp(0, self.pages.shape[1] - 1)]
            slots_of = self.scout.slots
            for part, (slots, pool) in enumerate(((slots_of.keys, self.keys), (slots_of.values, self.values))):
                held, there = slots[layer][self.rows].cpu(), pool[layer][pages, head]
                if self.code_steps is not None:
                    codes = slots_of.codes(layer, self.code_steps)
                    assert codes is not None
                    factors = codes.factors[self.rows, ..., part, :].cpu()
                    held = reference.of_codes(held, self.code_steps[part][:, None], factors)
                differs = ((held.float() != there.float()).any(dim=-1) & valid).nonzero()
                assert not len(differs), f"layer {layer}: entry, head, slot, token {differs[:4].tolist()}"

    def check_digests(self, lengths: torch.Tensor) -> None:
        """Assert that digests of all blocks with tokens are correct, for rows of ``lengths`` tokens."""
        for digests, keys in zip(self.digests, self.keys, strict=True):
            for pages, length in zip(self.pages, lengths.tolist(), strict=True):
                for block, page in enumerate(pages[: -(-length // BLOCK_TOKENS)].tolist()):
                    held = keys[page, :, : length - block * BLOCK_TOKENS]
                    expected = torch.stack((held.amax(dim=1), held.amin(dim=1)), dim=1)
                    assert torch.equal(digests[page].cpu(), expected), f"block {block} of a row with {length} tokens"


# the emulation is slow, so it runs only some of the combinations
ON_GPU = DEVICE == "cuda"
WORKERS = [(False, 0.0), (True, 0.4), (False, 1.0), *([(True, 0.0), (True, 1.0)] if ON_GPU else [])]
BUDGETS = [(36, None, 4), (36, 4, 0), (9, None, 0), (9, None, 3), (9, 6, 0), (6, 4, 2)]


@pytest.mark.parametrize("recorded", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("predicts", [False, True] if ON_GPU else [True])
@pytest.mark.parametrize(("worker", "share"), WORKERS)
@pytest.mark.parametrize(("budget", "slots", "interval"), BUDGETS if ON_GPU else BUDGETS[1:5])
def test_decoding_attends_to_slots_and_misses(
    budget: int, slots: int | None, interval: int, worker: bool, share: float, predicts: bool, recorded: bool
) -> None:
    # compact digests with a worker, so that LSE shifts read compact digests too
    decoding = Decoding(budget, interval, slots, worker, share, compact=worker and interval == 0)
    check_decoding(decoding, budget, interval, predicts, recorded)


@pytest.mark.parametrize(("worker", "share"), [(True, 0.4), (False, 1.0)])
def test_decoding_over_fp8_attends_to_slots_and_misses_as_they_are_stored(worker: bool, share: float) -> None:
    decoding = Decoding(9, 0, 6, worker, share, compact=worker, pool=reference.FP8)
    check_decoding(decoding, 9, 0, predicts=True, recorded=False)


@pytest.mark.parametrize(("budget", "slots", "interval"), BUDGETS if ON_GPU else [(36, 4, 0), (9, None, 3), (9, 6, 0)])
@pytest.mark.parametrize(("worker", "share"), [(True, 0.4), (False, 1.0)])
def test_slots_of_codes_are_attended_as_what_they_stand_for(
    budget: int, slots: int | None, interval: int, worker: bool, share: float
) -> None:
    decoding = Decoding(budget, interval, slots, worker, share, compact=worker, coded=True)
    assert decoding.scout.slots.keys[0].dtype == torch.uint8
    check_decoding(decoding, budget, interval, predicts=True, recorded=ON_GPU)


def check_decoding(decoding: Decoding, budget: int, interval: int, predicts: bool, recorded: bool) -> None:
    everything = budget == 36
    decoding.ends = decoding.scout.recall_joins_at_logits = interval > 2
    with decoding.engine():
        decoding.load_initial_blocks()
        torch.cuda.synchronize()
        decoding.check_slots()
        for _ in decoding.steps(predicts, recorded):
            decoding.check_slots()
            for layer in range(LAYERS):
                if everything or interval == 0:
                    expected = decoding.expected(layer, everything)
                    torch.testing.assert_close(decoding.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)
    assert int(decoding.scout.refused) == 0
    if client := decoding.scout._mailbox:
        assert client.read_state().generation == STEPS + recorded  # recorded: kernels ran once before


@pytest.mark.parametrize(("interval", "early"), [(1, 0), (3, 0), (7, 2)])
def test_what_becomes_resident_is_told_by_the_real_query(interval: int, early: int) -> None:
    budget = 9
    decoding = Decoding(budget, interval, early=early)
    decoding.predicted = torch.zeros_like(decoding.query)
    first = decoding.lengths + 1
    wanted = found = 0
    decoding.load_initial_blocks()
    for _ in range(STEPS):
        decoding.next_tokens()
        wrong = torch.randn(decoding.query.shape, generator=decoding.random).to(DEVICE, DTYPE)
        decoding.predicted.copy_(decoding.query + 3 * wrong)
        torch.cuda.synchronize()
        before = [decoding.is_held(decoding.held(layer)) for layer in range(LAYERS)]
        decoding.run(predicts=True)
        torch.cuda.synchronize()
        decoding.check_slots()
        for layer in range(LAYERS):
            logits, counts = decoding.logits(layer, decoding.query[layer, :-1].cpu().float())
            scores = reference.block_scores(logits, counts, SCALE) + 0.5 * before[layer]
            chosen = decoding.is_held(reference.select_blocks(scores, counts, budget, SINK, RECENT))
            held = decoding.is_held(decoding.held(layer))
            steps = decoding.lengths - first + 1
            due = ((steps + layer) % interval == 0) | (steps <= early)
            wanted += int(chosen[due].sum())
            found += int((chosen & held)[due].sum())
            tail = torch.nn.functional.one_hot(counts - 1, MAX_BLOCKS).bool()[:, None]
            assert not (held & ~before[layer] & ~tail)[~due].any(), "somebody recalled whose turn it was not"
    # of two blocks with equal scores, either may be selected
    assert found >= 0.99 * wanted > 0
    assert int(decoding.scout.counted[:, 1].sum()) > 0


def test_steps_that_nobody_ends_end_with_their_last_layer() -> None:
    decoding = Decoding(9, 2, None, worker=False, share=0.0)
    decoding.scout.recall_joins_at_logits = True  # wrong, because end_step is never called
    decoding.load_initial_blocks()
    for _ in range(STEPS):
        decoding.next_tokens()
        decoding.run(predicts=True)
    assert not decoding.scout.recall_joins_at_logits
    torch.cuda.synchronize()
    decoding.check_slots()
    assert int(decoding.scout.counted[:, 1].sum()) > 0


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize(
    ("worker", "share", "min_miss_score", "interval"),
    [(False, 1.0, None, 0), (True, 0.5, -3.5, 0), (False, 1.0, -2.5, 2)],
)
def test_gathered_blocks_stay_in_their_slots(
    worker: bool, share: float, min_miss_score: float | None, interval: int, predicts: bool
) -> None:
    decoding = Decoding(9, interval, None, worker, share, min_miss_score)
    gathered = 0
    with decoding.engine():
        decoding.load_initial_blocks()
        torch.cuda.synchronize()
        for _ in range(STEPS):
            before = [decoding.is_held(decoding.held(layer)) for layer in range(LAYERS)]
            decoding.next_tokens()
            decoding.run(predicts)
            torch.cuda.synchronize()
            decoding.check_slots()
            for layer in range(LAYERS):
                new, now = decoding.gathered(layer), decoding.is_held(decoding.held(layer))
                gathered += int(new.sum())
                if interval:
                    continue
                assert (new <= now).all()
                tails = (decoding.lengths - 1) // BLOCK_TOKENS
                opened = decoding.is_held(tails[:, None, None].expand(-1, HEADS, 1))
                assert ((now & ~before[layer]) <= (new | opened)).all()
                expected = decoding.expected(layer, everything=False)
                torch.testing.assert_close(decoding.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)
                if share == 1.0 and min_miss_score is None:
                    assert (decoding.misses(layer) < 0).all()  # there are slots for all selected blocks
    total = dict(zip(TOTALS, decoding.scout.counted.sum(dim=0).tolist(), strict=True))
    misses, recalled = total["misses"], total["recalled"]
    assert total["gathered"] == gathered and 0 <= total["resident"] <= total["selected"]
    assert 0 < gathered <= misses and (gathered < misses or share == 1.0)
    assert bool(recalled) == bool(interval)
    assert int(decoding.scout.refused) == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_row_that_arrived_is_resident_after_its_first_step(share: float) -> None:
    decoding = Decoding(36, 0, share=share)
    decoding.scout.reset_rows(decoding.rows)
    decoding.next_tokens()
    decoding.run(predicts=False)
    torch.cuda.synchronize()
    decoding.check_slots()
    torch.testing.assert_close(
        decoding.out[0, :-1].cpu().float(), decoding.expected(0, everything=True), rtol=2e-2, atol=2e-2
    )
    held = decoding.scout.slots.positions(0)[decoding.rows].cpu()
    blocks = -(-decoding.lengths // BLOCK_TOKENS)
    assert torch.equal((held >= 0).sum(dim=2), blocks[:, None].expand(-1, HEADS))


@pytest.mark.parametrize("arrived", [False, True])
@pytest.mark.parametrize(("worker", "predicts"), [(True, True), (False, False), *([(True, False)] if ON_GPU else [])])
def test_long_rows_attend_to_everything_in_their_first_step(worker: bool, predicts: bool, arrived: bool) -> None:
    decoding = Decoding(9, 0, worker=worker, share=0.4, whole=WholeSteps(beyond=700, steps=1))
    is_long = torch.tensor([length + 1 > 700 for length in LENGTHS.values()])
    with decoding.engine():
        if arrived:
            decoding.scout.reset_rows(decoding.rows)
        else:
            decoding.load_initial_blocks()
        for step in range(3):
            decoding.next_tokens()
            torch.cuda.synchronize()
            assert decoding.scout.step.whole(len(LENGTHS)).cpu().bool().tolist() == (is_long & (step == 0)).tolist()
            decoding.run(predicts)
            torch.cuda.synchronize()
            decoding.check_slots()
            for layer in range(LAYERS if not arrived or step else 0):  # a row that arrived gets slots in its first step
                expected = decoding.expected(layer, everything=False)
                if step == 0:
                    expected[is_long] = decoding.expected(layer, everything=True)[is_long]
                torch.testing.assert_close(decoding.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)
            if step == 0:
                of_long = decoding.out[1, :-1].cpu().float()[is_long]
                every = decoding.expected(1, everything=True)[is_long]
                torch.testing.assert_close(of_long, every, rtol=2e-2, atol=2e-2)
    assert int(decoding.scout.refused) == 0


@pytest.mark.parametrize("predicts", [False, True])
def test_in_their_first_steps_long_rows_attend_to_what_is_worth_it(predicts: bool) -> None:
    steps, least = 2, math.log(GROUP / 28)  # about half of the blocks of long rows score this much
    decoding = Decoding(9, 50, early=steps, whole=WholeSteps(beyond=700, steps=steps), whole_score=least)
    is_long = torch.tensor([length > 700 for length in LENGTHS.values()])
    decoding.predicted = torch.zeros_like(decoding.query)
    decoding.load_initial_blocks()
    for step in range(steps + 1):
        decoding.next_tokens()
        wrong = torch.randn(decoding.query.shape, generator=decoding.random).to(DEVICE, DTYPE)
        decoding.predicted.copy_(decoding.query + 3 * wrong)
        torch.cuda.synchronize()
        assert decoding.scout.step.whole(len(LENGTHS)).cpu().bool().tolist() == (is_long & (step < steps)).tolist()
        decoding.run(predicts)
        torch.cuda.synchronize()
        decoding.check_slots()
        for layer in range(LAYERS if step < steps else 0):
            expected, left_out = decoding.expected_of_worth(layer, least)
            assert left_out[is_long].any()
            found = decoding.out[layer, :-1].cpu().float()
            torch.testing.assert_close(found[is_long], expected[is_long], rtol=2e-2, atol=2e-2)
    assert int(decoding.scout.refused) == 0


def test_rows_that_are_let_go_begin_again_but_their_first_steps_are_over() -> None:
    decoding = Decoding(9, 0, whole=WholeSteps(beyond=700, steps=2))
    decoding.scout.reset_rows(decoding.rows[:2])
    decoding.next_tokens()
    torch.cuda.synchronize()
    decoding.scout.reset_rows(decoding.rows[3:])  # a new request took this row
    decoding.next_tokens()
    torch.cuda.synchronize()
    decoding.scout.hold_rows(whole=False)  # as in the step in which whole rows no longer fit
    decoding.load_rows()
    torch.cuda.synchronize()
    step, count = decoding.scout.step, len(LENGTHS)
    assert step.begins(count).cpu().tolist() == [1] * count
    assert step.whole(count).cpu().tolist() == [0, 0, 0, 1]
    for is_early in (1, 0):
        decoding.next_tokens()
        torch.cuda.synchronize()
        assert not step.begins(count).cpu().any()
        assert step.whole(count).cpu().tolist() == [0, 0, 0, is_early]


def test_every_row_is_scored_at_every_step_and_the_text_is_the_same_above_the_budget() -> None:
    decoding = Decoding(36, 2, slots=8)
    decoding.scout.reset_rows(decoding.rows)
    for _ in range(STEPS):
        decoding.next_tokens()
        decoding.run(predicts=False)
        torch.cuda.synchronize()
        decoding.check_slots()
        for layer in range(LAYERS):
            expected = reference.block_scores(*decoding.logits(layer, decoding.query[layer, :-1].cpu().float()), SCALE)
            found = decoding.scout._scores[layer][decoding.rows].cpu()
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.02)
            expected = decoding.expected(layer, everything=True)
            torch.testing.assert_close(decoding.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)
    assert int(decoding.scout.refused) == 0
