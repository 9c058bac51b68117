"""Decode policies and chunked prefill over a paged host pool, against softmax attention over each row's tokens."""

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from attention_oracle import attention_over_blocks, causal_attention, softmax_attention
from decoding import CLOSE, Decoding, Life, Requests, Shape, Step, T
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import BlockList, DecodeBatch, LayerCache
from sglang_hybrid.engines.torch import PagedPrefill, TorchAttention
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.ops.reference import DIGEST_SPREAD, NO_BLOCK
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.full import FullPolicy
from sglang_hybrid.policies.registry import PolicyContext, policy_named, prediction_of
from sglang_hybrid.policies.scout.options import ScoutAttentionOptions, ScoutOptions
from sglang_hybrid.policies.scout.policy import ScoutPolicy, Selection
from sglang_hybrid.policies.scout.rules import ScoutRules, rules_of_scout
from sglang_hybrid.policies.scout.tuning import DEFAULT_MISS_SHARE, FIRST_STEPS, tuning_of
from sglang_hybrid.worker.miss_server import PendingAttention
from sglang_hybrid.worker.torch_attention import TorchMisses

SEEDS = st.integers(0, 2**32 - 1)
HEADS = st.integers(1, 3)
GROUP = st.integers(1, 5)
DIM = st.sampled_from([8, 16])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# one token, both sides of a block boundary, and some blocks: rows of very different lengths in one batch
LENGTHS = st.one_of(st.sampled_from([1, 2, 31, 32, 33, 64, 65]), st.integers(1, 12 * T))
SEVERAL_LENGTHS = st.lists(LENGTHS, min_size=1, max_size=4)
SHAPES = st.builds(Shape, heads=HEADS, group=GROUP, dim=DIM, value_dim=DIM, dtype=DTYPES)


def decode_once(policy: DecodePolicy, requests: Requests) -> torch.Tensor:
    """Decode the last token of every row, as the first decode step of its request."""
    batch = requests.decode_batch()
    policy.reset_rows(batch.rows_on_host)
    policy.begin_step(batch)
    return policy.decode(requests.last_queries(), requests.cache, batch, requests.shape.scale)


def test_the_configuration_names_the_policy() -> None:
    assert isinstance(TorchAttention(HybridConfig(policy="full"), rows=1, layers=1).policy, FullPolicy)
    assert isinstance(TorchAttention(HybridConfig(policy="scout"), rows=1, layers=1).policy, ScoutPolicy)


# Decode within the budget


@pytest.mark.parametrize(
    "config",
    [
        HybridConfig(policy="full"),
        HybridConfig(policy="scout", budget_tokens=12 * T),
        HybridConfig(policy="scout", budget_tokens=20 * T, sink_blocks=0, recent_blocks=0),
        HybridConfig(policy="scout", budget_tokens=12 * T, sink_blocks=4, recent_blocks=7, sketch_channels=0),
    ],
    ids=["full", "scout", "scout without always-in blocks", "scout without sketches"],
)
@settings(max_examples=40)
@given(lengths=SEVERAL_LENGTHS, shape=SHAPES, seed=SEEDS)
def test_a_budget_that_holds_the_context_gives_full_attention(
    config: HybridConfig, lengths: list[int], shape: Shape, seed: int
) -> None:
    requests = Requests(lengths, shape, seed)
    requests.write_all()
    out = decode_once(TorchAttention(config, len(lengths), layers=1).policy, requests)
    requests.assert_close(out, requests.full_attention())


# Decode with a budget below the context


def best_positions(requests: Requests, config: HybridConfig, row: int, head: int) -> tuple[set[int], set[int]]:
    """Return the always attended blocks and the best others, from the row's tokens, without digests and tables."""
    group, blocks = requests.shape.group, requests.row_keys[row][head].double().split(T)
    queries = requests.last_queries()[row, head * group : (head + 1) * group].double()
    middles = torch.stack([(b.amax(dim=0) + b.amin(dim=0)) / 2 for b in blocks])
    radii = torch.stack([(b.amax(dim=0) - b.amin(dim=0)) / 2 for b in blocks])
    estimates = queries @ middles.T + DIGEST_SPREAD * queries.abs() @ radii.T
    shares = torch.softmax(estimates[:, :-1] * requests.shape.scale, dim=1).sum(dim=0)  # without the tail
    newest = len(blocks) - 1 - config.recent_blocks
    always = {p for p in range(len(blocks)) if p >= newest or p < config.sink_blocks}
    others = sorted(set(range(len(blocks))) - always, key=lambda p: float(shares[p]), reverse=True)
    return always, set(others[: config.budget_tokens // T - len(always)])


@st.composite
def small_budgets(draw: st.DrawFn) -> HybridConfig:
    sink, recent = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    blocks = sink + recent + 1 + draw(st.integers(0, 3))
    return HybridConfig(
        budget_tokens=blocks * T,
        sink_blocks=sink,
        recent_blocks=recent,
        sketch_channels=0,
    )


@st.composite
def overflowing_requests(draw: st.DrawFn) -> tuple[HybridConfig, Requests]:
    """Draw requests of which at least one is longer than the budget; others may be short."""
    config = draw(small_budgets())
    lengths = [config.budget_tokens + draw(st.integers(1, 6 * T)), *draw(st.lists(LENGTHS, max_size=3))]
    requests = Requests(draw(st.permutations(lengths)), draw(SHAPES), draw(SEEDS))
    requests.write_all()
    return config, requests


@given(overflowing_requests())
def test_scout_is_softmax_over_exactly_the_blocks_within_the_budget(case: tuple[HybridConfig, Requests]) -> None:
    config, requests = case
    table = requests.decode_batch().page_table
    blocks: list[list[list[tuple[int, int]]]] = []
    for row, length in enumerate(requests.lengths):
        blocks.append([])
        for head in range(requests.shape.heads):
            always, earned = best_positions(requests, config, row, head)
            blocks[row].append([(int(table[row, p]), min(T, length - p * T)) for p in sorted(always | earned)])
    expected, _ = attention_over_blocks(
        requests.last_queries(), requests.cache.keys, requests.cache.values, blocks, requests.shape.scale
    )
    # the first decoded query makes the best blocks resident, so there are no misses
    rules = dataclasses.replace(rules_of_scout(config), stands_for_all=False)
    requests.assert_close(decode_once(Watched(config, len(blocks), rules=rules), requests), expected)


def real(positions: torch.Tensor) -> list[int]:
    """Return the positions in a list. Its empty places, NO_BLOCK, must come last."""
    listed = [p for p in positions.tolist() if p != NO_BLOCK]
    assert positions.tolist() == listed + [NO_BLOCK] * (len(positions) - len(listed))
    return listed


@given(overflowing_requests())
def test_scout_tells_the_blocks_that_are_always_in_from_those_that_earned_it(
    case: tuple[HybridConfig, Requests],
) -> None:
    config, requests = case
    policy, batch = Watched(config, rows=len(requests.lengths)), requests.decode_batch()
    policy.reset_rows(batch.rows_on_host)
    policy.begin_step(batch)
    chosen = policy.select(requests.last_queries(), requests.cache, batch, requests.shape.scale)
    for row in range(len(requests.lengths)):
        for head in range(requests.shape.heads):
            always, earned = best_positions(requests, config, row, head)
            assert sorted(real(chosen.near[row, head])) == sorted(always | earned)
            assert sorted(real(chosen.recalled[row, head])) == sorted(earned)
            assert real(chosen.misses[row, head]) == []


# Decode step by step: rows grow, begin and end, and their numbers are used again


@st.composite
def lives(draw: st.DrawFn, longest: int) -> list[Life]:
    """Draw requests of at most ``longest`` tokens: up to three row numbers, each with one or two requests in turn."""
    choice = random.Random(draw(SEEDS))  # evenly, because long rows that cross boundaries matter most here
    drawn = []
    for number in choice.choice([[0], [1, 0], [2, 0, 1]]):
        first = choice.randint(0, 3)
        for _ in range(choice.randint(1, 2)):
            steps = choice.choice([1, 5, 12, 20, 38])
            prompt = choice.randint(1, longest - steps)
            if choice.random() < 0.5:  # a new block begins within the first few steps
                prompt = max(1, prompt // T * T - choice.randint(0, 3))
            drawn.append(Life(number, prompt, first, steps))
            first += steps + choice.randint(0, 2)
    return drawn


class RecordedMisses(TorchMisses):
    def __init__(self) -> None:
        self.query = torch.empty(0)
        self.blocks: BlockList | None = None
        self.steps: list[int] = []

    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        self.query, self.blocks = query, blocks
        self.steps.append(step)
        return super().post(query, cache, blocks, scale, step)


class Watched(ScoutPolicy):
    """Policy scout that records its last selection, and the ratios that it reports."""

    def __init__(
        self,
        config: HybridConfig,
        rows: int,
        layers: int = 1,
        prompts: PromptQueries | None = None,
        any_block: bool = False,
        rules: ScoutRules | None = None,
    ) -> None:
        self.misses = RecordedMisses()
        tuning = dataclasses.replace(tuning_of(config, layers), any_block=(any_block,) * layers)
        super().__init__(config, rules or rules_of_scout(config), self.misses, tuning, prompts, rows)
        self.chosen = Selection(*3 * [torch.empty(0)])
        self.ratios: list[tuple[int, float]] = []
        self.on_ratio = lambda layer, ratio: self.ratios.append((layer, ratio))

    def select(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> Selection:
        self.chosen = super().select(query, cache, batch, scale)
        return self.chosen


SMALL_SHAPES = st.builds(Shape, heads=st.integers(1, 2), group=st.integers(1, 3), dim=st.just(8), value_dim=st.just(8))


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("bonus", [0.0, 2.0])
@pytest.mark.parametrize("interval", [0, 1, 3])
@pytest.mark.parametrize("predicted", [True, False], ids=["wrong predictions", "no prediction"])
@settings(max_examples=4)
@given(
    plan=lives(longest=8 * T),
    shape=SMALL_SHAPES,
    seed=SEEDS,
    always=st.sampled_from([(0, 0), (1, 2), (2, 1)]),
    only_selected=st.booleans(),
)
def test_a_budget_that_holds_the_context_gives_full_attention_at_every_step(
    per_layer: bool,
    bonus: float,
    interval: int,
    predicted: bool,
    plan: list[Life],
    shape: Shape,
    seed: int,
    always: tuple[int, int],
    only_selected: bool,
) -> None:
    options = ScoutOptions(resident_bonus=bonus, recall_interval=interval)
    config = HybridConfig(
        budget_tokens=8 * T,
        sink_blocks=always[0],
        recent_blocks=always[1],
        sections={"scout": options},
    )
    rules = dataclasses.replace(rules_of_scout(config), per_layer=per_layer, only_selected=only_selected)
    decoding, policy = Decoding(plan, shape, seed), Watched(config, rows=3, rules=rules)
    requests = decoding.requests

    def check(step: Step) -> None:
        for row, (request, length) in enumerate(zip(step.requests, step.lengths, strict=True)):
            keys, values = (tokens[request][:, :length] for tokens in (requests.row_keys, requests.row_values))
            requests.assert_close(step.out[row], softmax_attention(step.queries[row], keys, values, shape.scale)[0])

    decoding.run(policy, check, lambda _: predicted)
    assert {ratio for _, ratio in policy.ratios} == {0.0}


class PlainScout:
    """Policy scout written from its description: sets of block positions, for one (request, KV head) at a time."""

    def __init__(self, config: HybridConfig, rules: ScoutRules, decoding: Decoding, from_prompts: bool) -> None:
        self.config, self._rules = config, rules
        self.any_block = False
        self.miss_share = (
            DEFAULT_MISS_SHARE if config.scout.min_miss_attention == "auto" else float(config.scout.min_miss_attention)
        )
        self._decoding = decoding
        self._from_prompts = from_prompts
        self.resident: dict[tuple[int, int], set[int]] = {}

    def always(self, length: int) -> set[int]:
        tail = (length - 1) // T
        return {
            p for p in range(tail + 1) if p < self.config.sink_blocks or tail - self.config.recent_blocks <= p <= tail
        }

    def scores(self, request: int, head: int, query: torch.Tensor, length: int) -> dict[int, float]:
        """Return the scores of blocks that are not always attended. Their shares are of all blocks but the tail."""
        requests = self._decoding.requests
        full = (length - 1) // T
        if full == 0:
            return {}
        group, total = requests.shape.group, torch.zeros(full, dtype=torch.float64)
        for h in range(requests.shape.heads) if self._rules.per_layer else [head]:
            blocks = requests.row_keys[request][h, : full * T].double().split(T)
            own = query[h * group : (h + 1) * group].double()
            tops, bottoms = (torch.stack([f(b, dim=0) for b in blocks]) for f in (torch.amax, torch.amin))
            radii = (tops - bottoms) / 2
            estimates = own @ (tops + bottoms).T / 2 + DIGEST_SPREAD * own.abs() @ radii.T
            total += torch.softmax(estimates * requests.shape.scale, dim=1).sum(dim=0)
        return {p: float(total[p].log()) for p in range(len(total)) if p not in self.always(length)}

    def attend(
        self, request: int, head: int, length: int, fresh: bool, query: torch.Tensor, real_query: torch.Tensor
    ) -> tuple[set[int], set[int]]:
        """Return the near blocks and the misses of this step. A recall that is due takes effect after this step.

        ``query`` selects blocks. If the rules recall by the real query, ``real_query`` decides what becomes resident.
        """
        config, bonus, interval = self.config, self.config.scout.resident_bonus, self.config.scout.recall_interval
        assert bonus != "auto" and interval != "auto"
        always, scores = self.always(length), self.scores(request, head, query, length)
        kept = config.budget_tokens if config.scout.resident_tokens == "auto" else config.scout.resident_tokens
        slots = max(0, kept // T - config.sink_blocks - config.recent_blocks - 1)
        room = config.budget_tokens // T - len(always)

        def best(of: dict[int, float], count: int) -> set[int]:
            return set(sorted(of, key=of.__getitem__, reverse=True)[:count])

        resident = self.resident.get((request, head), set())
        if fresh:
            asked = self._decoding.prompt_query(request) if self._from_prompts else query
            resident = best(self.scores(request, head, asked, length), min(room, slots))
        elif length % T == 1:
            left = (length - 1) // T - config.recent_blocks - 1
            if left >= config.sink_blocks and slots:
                resident = resident | {left}
                if len(resident) > slots:
                    resident = resident - {min(resident - {left}, key=scores.__getitem__)}

        def chosen_by(scores: dict[int, float]) -> set[int]:
            return best({p: s + bonus * (p in resident) for p, s in scores.items()}, room)

        selected = chosen_by(scores)
        group = self._decoding.requests.shape.group
        shared_by = group * (self._decoding.requests.shape.heads if self._rules.per_layer else 1)
        candidates = set(scores) if self.any_block else selected
        least = self.miss_share * shared_by
        misses = {p for p in candidates - resident if math.exp(scores[p]) >= least}
        if self.any_block:
            misses = best({p: scores[p] for p in misses}, room)
        near = always | resident
        if self._rules.only_selected:
            near = always | (resident & selected)
        steps = length - self._decoding.plan[request].prompt
        due = interval and (steps % interval == 0 or steps <= self._rules.early_recalls)
        self.resident[request, head] = resident
        if due:
            wanted = scores
            if self._rules.recalls_by_real_query:
                wanted = self.scores(request, head, real_query, length)
            self.resident[request, head] = best({p: wanted[p] for p in chosen_by(wanted)}, slots)
        return near, misses


def attention_by_two_queries(
    decoding: Decoding, shifts: bool, step: Step, row: int, head: int, near: set[int], misses: set[int]
) -> torch.Tensor:
    """Attend with one softmax over all tokens of both sets. Logits of the misses are by the predicted query.

    With ``shifts`` these logits are shifted: the middles of the blocks estimate the mass that each query gives to the
    misses, and the shift is the difference.
    """
    requests, request, length = decoding.requests, step.requests[row], step.lengths[row]
    group = requests.shape.group
    own = slice(head * group, (head + 1) * group)
    real_query = step.queries[row, own].double()
    guess = real_query if step.guesses is None else step.guesses[row, own].double()
    scale, keys = requests.shape.scale, requests.row_keys[request][head].double()
    shift = torch.zeros(group, 1, dtype=torch.float64)
    if shifts and misses:
        blocks_of = [keys[p * T : (p + 1) * T] for p in sorted(misses)]
        told = [(b.amax(dim=0) + b.amin(dim=0)) / 2 for b in blocks_of]
        masses = [torch.logsumexp(query @ torch.stack(told).T * scale, dim=1) for query in (real_query, guess)]
        shift = (masses[0] - masses[1])[:, None]
    logits, values = [], []
    for query, blocks, more in ((real_query, near, 0.0), (guess, misses, shift)):
        for p in sorted(blocks):
            tokens = slice(p * T, min((p + 1) * T, length))
            logits.append(query @ keys[tokens].T * scale + more)
            values.append(requests.row_values[request][head, tokens].double())
    return torch.softmax(torch.cat(logits, dim=1), dim=1) @ torch.cat(values)


@st.composite
def scouting(draw: st.DrawFn) -> HybridConfig:
    options = ScoutOptions(
        resident_tokens=draw(st.sampled_from(["auto", 0, 4 * T, 5 * T, 20 * T])),
        resident_bonus=draw(st.sampled_from([0.0, 0.5, 2.0])),
        min_miss_attention=draw(st.sampled_from([0.0, 0.001, 0.1, 0.3])),
        recall_interval=draw(st.sampled_from([0, 1, 2, 3, 7])),
    )
    return draw(small_budgets()).with_section(options)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    config=scouting(),
    per_layer=st.booleans(),
    only_selected=st.booleans(),
    shifts=st.booleans(),
    by_real_query=st.booleans(),
    early=st.sampled_from([0, 2, 8]),
    plan=lives(longest=12 * T),
    shape=SMALL_SHAPES,
    seed=SEEDS,
    predicted_one_in=st.sampled_from([0, 1, 2]),
    from_prompts=st.booleans(),
    any_block=st.booleans(),
)
def test_each_step_attends_to_what_plain_python_says_each_block_once_and_with_its_query(
    config: HybridConfig,
    per_layer: bool,
    only_selected: bool,
    shifts: bool,
    by_real_query: bool,
    early: int,
    plan: list[Life],
    shape: Shape,
    seed: int,
    predicted_one_in: int,
    from_prompts: bool,
    any_block: bool,
) -> None:
    decoding = Decoding(plan, shape, seed)
    prompts = PromptQueries(3) if from_prompts else None
    rules = dataclasses.replace(
        rules_of_scout(config), per_layer=per_layer, only_selected=only_selected, shifts=shifts,
        recalls_by_real_query=by_real_query, early_recalls=early, stands_for_all=False,
    )  # fmt: skip
    plain = PlainScout(config, rules, decoding, from_prompts)
    # only profiles with shares ask for any_block
    plain.any_block = any_block = any_block and not only_selected and plain.miss_share > 0
    policy = Watched(config, rows=3, prompts=prompts, any_block=any_block, rules=rules)

    def check(step: Step) -> None:
        missed = 0
        for row, (request, length) in enumerate(zip(step.requests, step.lengths, strict=True)):
            query = step.queries if step.guesses is None else step.guesses
            for head in range(shape.heads):
                near, misses = plain.attend(request, head, length, step.fresh[row], query[row], step.queries[row])
                missed += len(misses)
                # compared as lists, not as sets: a block that is listed twice would count twice
                assert sorted(real(policy.chosen.near[row, head])) == sorted(near)
                assert sorted(real(policy.chosen.misses[row, head])) == sorted(misses)
                assert near.isdisjoint(misses)
                expected = attention_by_two_queries(decoding, shifts, step, row, head, near, misses)
                out = step.out[row].unflatten(0, (shape.heads, -1))[head]
                torch.testing.assert_close(out.double(), expected, **CLOSE[torch.float32])
        ratio = missed / (len(step.requests) * shape.heads * (config.budget_tokens // T))
        layer, told = policy.ratios.pop()
        assert layer == 0 and told == pytest.approx(ratio)
        assert not policy.ratios

    decoding.run(policy, check, lambda now: bool(predicted_one_in) and now % predicted_one_in == 0, prompts)


# Rules of policy scout, one by one

SMALL = Shape(heads=2, group=2, dim=8, value_dim=8)


@dataclass
class Run:
    """One request that is decoded for many steps, and the policy's selection at each step."""

    config: HybridConfig
    decoding: Decoding
    policy: Watched
    chosen: list[Selection]
    lengths: list[int]

    def always(self, step: int) -> set[int]:
        return PlainScout(self.config, rules_of_scout(self.config), self.decoding, from_prompts=False).always(
            self.lengths[step]
        )

    def resident(self, step: int, head: int) -> set[int]:
        return set(real(self.chosen[step].near[0, head])) - self.always(step)

    def selected(self, step: int, head: int) -> set[int]:
        """Return the blocks that a recall would make resident: the whole selection, because slots suffice."""
        return set(real(self.chosen[step].recalled[0, head]))

    def opens_a_block(self, step: int) -> bool:
        return self.lengths[step] % T == 1


def scouting_by(**options: object) -> HybridConfig:
    config = HybridConfig(budget_tokens=6 * T, sink_blocks=1, recent_blocks=1)
    return config.with_section(ScoutOptions(**options))  # type: ignore[arg-type]


def long_run(
    steps: int = 70,
    predicted: bool = True,
    prompt: int = 9 * T + 20,
    any_block: bool = False,
    rules: dict[str, bool] | None = None,
    **settings: object,
) -> Run:
    config = scouting_by(**settings)  # 3 slots
    changed = dataclasses.replace(rules_of_scout(config), **(rules or {}))
    decoding = Decoding([Life(0, prompt, 0, steps)], SMALL, seed=5)
    run = Run(config, decoding, Watched(config, rows=1, any_block=any_block, rules=changed), [], [])

    def check(step: Step) -> None:
        run.chosen.append(run.policy.chosen)
        run.lengths.append(step.lengths[0])

    decoding.run(run.policy, check, lambda _: predicted)
    return run


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize("bonus", [0.0, 0.5])
def test_recall_makes_a_selection_resident_from_the_next_step_on_and_not_before(predicted: bool, bonus: float) -> None:
    by_prediction = {"recalls_by_real_query": False}
    run = long_run(recall_interval=1, resident_bonus=bonus, predicted=predicted, rules=by_prediction)
    moved = 0
    for step in range(len(run.chosen) - 1):
        for head in range(SMALL.heads):
            if not run.opens_a_block(step + 1):
                assert run.resident(step + 1, head) == run.selected(step, head)
            missed = set(real(run.chosen[step].misses[0, head]))
            assert missed.isdisjoint(run.resident(step, head))
            moved += len(missed)
    assert moved, "otherwise nothing was recalled"


def test_between_two_recalls_the_resident_blocks_stay() -> None:
    run = long_run(recall_interval=4, resident_bonus=0.0)
    changed: dict[int, list[int]] = {head: [] for head in range(SMALL.heads)}
    for step in range(1, len(run.chosen)):
        for head in range(SMALL.heads):
            if run.resident(step, head) != run.resident(step - 1, head) and not run.opens_a_block(step):
                changed[head].append(step)
    for steps in changed.values():
        assert steps
        # every fourth step recalls for the steps after it, and so do the first steps
        assert all(step % 4 == 0 or step <= FIRST_STEPS for step in steps)


@pytest.mark.parametrize("tokens", [5 * T, 6 * T])
def test_recalled_blocks_keep_their_order_whether_some_find_no_slot_or_not(tokens: int) -> None:
    """Otherwise the rounding of a row's sums would depend on how many blocks the longest row of the batch selects."""
    run = long_run(recall_interval=1, resident_tokens=tokens)
    for chosen in run.chosen:
        for head in range(SMALL.heads):
            recalled = real(chosen.recalled[0, head])
            assert recalled == sorted(recalled) and len(recalled) == tokens // T - 3


def test_interval_0_never_recalls() -> None:
    run = long_run(recall_interval=0, resident_bonus=0.0)
    first = run.resident(0, 0)
    for step in range(len(run.chosen)):
        if any(map(run.opens_a_block, range(step + 1))):
            break
        assert run.resident(step, 0) == first
    assert step > 10
    # later, only blocks that leave the recent window become resident
    for step in range(1, len(run.chosen)):
        came = run.resident(step, 0) - run.resident(step - 1, 0)
        assert came == ({run.lengths[step] // T - 2} if run.opens_a_block(step) else set())


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_what_is_always_in_is_never_among_the_resident_or_recalled_blocks(interval: int) -> None:
    run = long_run(recall_interval=interval)
    for step in range(len(run.chosen)):
        for head in range(SMALL.heads):
            near = real(run.chosen[step].near[0, head])
            assert len(near) == len(set(near))  # a sink block with a slot of its own would be listed twice
            assert len(near) <= 6
            assert run.selected(step, head).isdisjoint(run.always(step))
            assert run.always(step) <= set(near)


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_a_block_that_leaves_the_recent_window_is_resident_at_once(interval: int) -> None:
    run = long_run(recall_interval=interval, resident_bonus=0.0)
    opened = [step for step in range(1, len(run.chosen)) if run.opens_a_block(step)]
    assert len(opened) > 1
    for step in opened:
        left = run.lengths[step] // T - 2  # the block before the tail and the one recent block
        assert left in run.always(step - 1)
        for head in range(SMALL.heads):
            assert left in run.resident(step, head)


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_what_gives_way_to_it_is_the_resident_block_that_scores_worst(interval: int) -> None:
    run = long_run(recall_interval=interval, resident_bonus=0.0, predicted=False)
    plain = PlainScout(run.config, rules_of_scout(run.config), run.decoding, from_prompts=False)
    for step in (step for step in range(1, len(run.chosen)) if run.opens_a_block(step)):
        length = run.lengths[step]
        query = run.decoding.requests.row_queries[0][length - 1]
        for head in range(SMALL.heads):
            scores = plain.scores(0, head, query, length)
            before = run.selected(step - 1, head) if interval == 1 else run.resident(step - 1, head)
            if interval == 3 and step % 3 == 0:
                before = run.selected(step - 1, head)
            (gone,) = before - run.resident(step, head)
            assert gone == min(before, key=scores.__getitem__)


def test_a_larger_bonus_keeps_more_of_what_is_resident() -> None:
    missed = {
        bonus: sum(
            len(real(chosen.misses[0, head]))
            for chosen in long_run(recall_interval=1, resident_bonus=bonus, predicted=False).chosen
            for head in range(SMALL.heads)
        )
        for bonus in (0.0, 1.0, 1e6)
    }
    assert missed[0.0] > missed[1.0] > missed[1e6] == 0


def test_a_miss_must_be_worth_its_share_of_attention_and_is_recalled_all_the_same() -> None:
    runs = [long_run(recall_interval=4, resident_bonus=0.0, min_miss_attention=share) for share in (0.0, 0.12, 1.0)]
    counts = []
    for run in runs:
        counts.append(0)
        for chosen, other in zip(run.chosen, runs[0].chosen, strict=True):
            assert torch.equal(chosen.recalled, other.recalled)
            assert torch.equal(chosen.near, other.near)
            for head in range(SMALL.heads):
                assert set(real(chosen.misses[0, head])) <= set(real(other.misses[0, head]))
                counts[-1] += len(real(chosen.misses[0, head]))
    assert counts[0] > counts[1] > counts[2] == 0


def test_a_share_that_decides_alone_takes_blocks_beyond_the_selection_and_changes_nothing_else() -> None:
    runs = [
        long_run(recall_interval=4, resident_bonus=0.0, min_miss_attention=0.05, any_block=some)
        for some in (False, True)
    ]
    more = 0
    for selected, every in zip(*(run.chosen for run in runs), strict=True):
        assert torch.equal(selected.recalled, every.recalled)
        assert torch.equal(selected.near, every.near)
        for head in range(SMALL.heads):
            assert set(real(selected.misses[0, head])) <= set(real(every.misses[0, head]))
            more += len(real(every.misses[0, head])) - len(real(selected.misses[0, head]))
    assert more > 0


def test_what_the_real_query_wants_becomes_resident_whatever_was_predicted() -> None:
    by_real, by_prediction = (
        long_run(recall_interval=1, resident_bonus=0.0, predicted=predicted) for predicted in (False, True)
    )
    for step in range(1, len(by_real.chosen)):
        for head in range(SMALL.heads if not by_real.opens_a_block(step) else 0):
            assert by_prediction.resident(step, head) == by_real.resident(step, head)


def test_attending_to_what_is_selected_bounds_what_is_attended_by_the_budget() -> None:
    bounded, all_resident = (long_run(recall_interval=4, rules={"only_selected": only}) for only in (True, False))
    more = 0
    for step, (chosen, other) in enumerate(zip(bounded.chosen, all_resident.chosen, strict=True)):
        for head in range(SMALL.heads):
            near, misses = real(chosen.near[0, head]), real(chosen.misses[0, head])
            assert set(near) | set(misses) == bounded.always(step) | bounded.selected(step, head)
            assert len(near) + len(misses) == 6
            # resident and recalled blocks are the same in both runs
            assert torch.equal(chosen.recalled, other.recalled)
            assert misses == real(other.misses[0, head])
            more += len(real(other.near[0, head])) - len(near)
    assert more > 0


@pytest.mark.parametrize(("tokens", "slots"), [(0, 0), (3 * T, 0), (4 * T, 1), (5 * T, 2), (20 * T, 17)])
def test_residents_are_as_many_as_asked_for_and_the_rest_of_the_selection_is_missed(tokens: int, slots: int) -> None:
    run = long_run(
        recall_interval=1, resident_bonus=0.0, resident_tokens=tokens, rules={"recalls_by_real_query": False}
    )
    for step, chosen in enumerate(run.chosen):
        for head in range(SMALL.heads):
            resident, misses = run.resident(step, head), real(chosen.misses[0, head])
            assert len(resident) <= slots
            assert len(misses) >= 3 - slots, "three blocks are selected beside those that are always in"
    if slots > 3:  # blocks that leave the recent window find slots beside the recalled ones
        opened = [step for step in range(1, len(run.chosen)) if run.opens_a_block(step)]
        assert all(run.resident(step, 0) > run.selected(step - 1, 0) for step in opened)


def test_what_a_request_gets_does_not_depend_on_which_others_run_beside_it() -> None:
    plan = [Life(0, 9 * T + 20, 2, 30), Life(1, 5 * T + 1, 0, 7), Life(2, 12 * T - 2, 9, 10), Life(1, 9 * T, 9, 30)]
    config = HybridConfig(budget_tokens=6 * T).with_section(ScoutOptions(recall_interval=3, resident_bonus=0.0))

    def run(lives: list[Life]) -> list[tuple[list[int], list[int], torch.Tensor]]:
        decoding, policy, seen = Decoding(plan, SMALL, seed=13), Watched(config, rows=3), []
        decoding.plan = lives  # the same requests, but only these are decoded

        def check(step: Step) -> None:
            if 0 in step.requests:
                row = step.requests.index(0)
                chosen = policy.chosen
                seen.append((real(chosen.near[row, 0]), real(chosen.misses[row, 0]), step.out[row]))

        decoding.run(policy, check, lambda _: False)
        return seen

    alone, beside = run(plan[:1]), run(plan)
    assert len(alone) == len(beside) == 30
    for (near, misses, out), (other_near, other_misses, other_out) in zip(alone, beside, strict=True):
        assert sorted(near) == sorted(other_near)
        assert misses == other_misses
        torch.testing.assert_close(out, other_out, **CLOSE[torch.float32])


def test_heads_that_share_a_selection_choose_the_same_blocks_and_heads_that_do_not_choose_others() -> None:
    together, alone = (long_run(recall_interval=2, rules={"per_layer": shared}) for shared in (True, False))
    for chosen in together.chosen:
        assert torch.equal(chosen.near[0, 0], chosen.near[0, 1])
        assert torch.equal(chosen.recalled[0, 0], chosen.recalled[0, 1])
    assert any(alone.selected(step, 0) != alone.selected(step, 1) for step in range(len(alone.chosen)))


@pytest.mark.parametrize("computed_here", [True, False])
def test_the_first_resident_blocks_are_the_best_for_the_last_token_of_the_prompt(computed_here: bool) -> None:
    # a prompt that was computed elsewhere has no query here: the first decoded query takes its place
    config = scouting_by(recall_interval=0, resident_bonus=0.0)
    decoding = Decoding([Life(2, 20 * T, 0, 1)], SMALL, seed=7)
    prompts = PromptQueries(3)
    prompts.store(0, torch.tensor([1]), torch.ones(1, 4, 8))  # the query of another row
    policy = Watched(config, rows=3, prompts=prompts)
    plain = PlainScout(config, rules_of_scout(config), decoding, from_prompts=True)
    length = 20 * T + 1

    def check(step: Step) -> None:
        asked = decoding.prompt_query(0) if computed_here else step.queries[0]
        other = step.queries[0] if computed_here else decoding.prompt_query(0)
        for head in range(SMALL.heads):
            best, of_other = (
                set(sorted(scores, key=scores.__getitem__)[-3:])
                for scores in (plain.scores(0, head, query, length) for query in (asked, other))
            )
            assert set(real(policy.chosen.near[0, head])) - plain.always(length) == best != of_other

    decoding.run(policy, check, lambda _: False, prompts if computed_here else None)


def decode_one(requests: Requests, policy: Watched, query: torch.Tensor, cache: LayerCache | None = None) -> Selection:
    batch = requests.decode_batch()
    policy.begin_step(batch)
    policy.decode(query, cache or requests.cache, batch, requests.shape.scale)
    return policy.chosen


def begun(**settings: object) -> tuple[Requests, Watched]:
    """Return a long request and its policy. Resident blocks were chosen by zero queries, so later queries miss."""
    requests = Requests([12 * T], SMALL, seed=3)
    requests.write_all()
    config = scouting_by(resident_bonus=0.0, **settings)
    policy = Watched(config, rows=1, layers=2)
    policy.reset_rows([0])
    decode_one(requests, policy, torch.zeros(1, 4, 8))
    return requests, policy


def test_an_announcement_is_not_used_in_a_later_step() -> None:
    requests, policy = begun(recall_interval=0)
    batch, query, guess = requests.decode_batch(), requests.last_queries(), torch.full((1, 4, 8), 9.0)
    policy.begin_step(batch)
    policy.ahead(guess, requests.cache, batch, SMALL.scale)
    assert torch.equal(policy.misses.query, guess)
    # this step is never finished
    decode_one(requests, policy, query)
    assert torch.equal(policy.misses.query, query)


def test_an_announcement_is_for_one_layer() -> None:
    requests, policy = begun(recall_interval=0)
    other = LayerCache(requests.cache.keys, requests.cache.values, requests.cache.digests, layer=1)
    batch, query, guess = requests.decode_batch(), requests.last_queries(), torch.full((1, 4, 8), 9.0)
    policy.reset_rows([0])
    policy.begin_step(batch)
    policy.ahead(guess, other, batch, SMALL.scale)
    policy.decode(query, requests.cache, batch, SMALL.scale)
    assert torch.equal(policy.misses.query, query)
    posted = len(policy.misses.steps)
    policy.decode(query, other, batch, SMALL.scale)
    assert len(policy.misses.steps) == posted, "what was announced is on its way already"


def test_layers_have_resident_blocks_of_their_own() -> None:
    requests, policy = begun(recall_interval=1)
    other = LayerCache(requests.cache.keys, requests.cache.values, requests.cache.digests, layer=1)
    policy.reset_rows([0])
    batch = requests.decode_batch()
    policy.begin_step(batch)
    queries = {0: requests.last_queries(), 1: -requests.last_queries()}
    for _ in range(2):
        for layer, cache in enumerate((requests.cache, other)):
            policy.decode(queries[layer], cache, batch, SMALL.scale)
            assert real(policy.chosen.misses[0, 0]) == []
        policy.begin_step(batch)


def test_misses_are_posted_with_their_pages_and_the_step_they_belong_to() -> None:
    requests, policy = begun(recall_interval=0)
    batch = dataclasses.replace(requests.decode_batch(), step=41)
    policy.begin_step(batch)
    policy.decode(requests.last_queries(), requests.cache, batch, SMALL.scale)
    assert policy.misses.steps[-1] == 41
    blocks = policy.misses.blocks
    assert blocks is not None
    for head in range(SMALL.heads):
        positions = real(policy.chosen.misses[0, head])
        assert positions
        assert real(blocks.ids[0, head]) == batch.page_table[0, positions].tolist()
        assert blocks.fill[0, head, : len(positions)].tolist() == [T] * len(positions)


def test_the_ratio_is_misses_over_budget_of_all_rows_and_heads() -> None:
    requests, policy = begun(recall_interval=0)
    policy.ratios.clear()
    chosen = decode_one(requests, policy, requests.last_queries())
    missed = sum(len(real(chosen.misses[0, head])) for head in range(SMALL.heads))
    assert missed
    assert policy.ratios == [(0, missed / (6 * SMALL.heads))]


def test_a_row_number_that_is_reused_starts_with_blocks_of_its_own() -> None:
    # the second request is shorter: blocks of the first would lie beyond its end
    plan = [Life(0, 20 * T, 0, 3), Life(0, 7 * T, 3, 3)]
    decoding = Decoding(plan, SMALL, seed=11)
    policy = Watched(
        HybridConfig(budget_tokens=6 * T).with_section(ScoutOptions(recall_interval=0, resident_bonus=0.0)), rows=1
    )
    seen = []

    def check(step: Step) -> None:
        seen.append(max(real(policy.chosen.near[0, 0])))
        assert len(real(policy.chosen.near[0, 0])) == 6

    decoding.run(policy, check, lambda _: False)
    assert seen == [20] * 3 + [7] * 3


def test_settings_that_change_start_the_rows_anew_from_their_prompts() -> None:
    requests = Requests([12 * T + 1], SMALL, seed=3)
    few = HybridConfig(budget_tokens=5 * T, recent_blocks=1)
    few = few.with_section(ScoutOptions(resident_bonus=0.0, recall_interval=0))
    attention = TorchAttention(few, rows=1, layers=1)
    prefill(requests, attention, {0: (0, 12 * T)})
    requests.write(0, 12 * T, 12 * T + 1)
    batch, outputs = requests.decode_batch(), []
    for config in (few, HybridConfig(policy="full"), few):
        attention.use(config)
        assert attention.config is config
        attention.begin_decode(batch)
        outputs.append(attention.decode(requests.last_queries(), requests.cache, batch, SMALL.scale))
    assert torch.equal(outputs[0], outputs[2])
    requests.assert_close(outputs[1], requests.full_attention())
    assert not torch.allclose(outputs[0], outputs[1])


# Prefill


@st.composite
def chunks(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Draw spans of a row's tokens, cut at arbitrary points."""
    cuts = draw(st.sets(st.integers(1, length), max_size=3))
    edges = sorted(cuts | {0, length})
    return list(itertools.pairwise(edges))


SHORT_LENGTHS = st.lists(st.one_of(st.sampled_from([1, 32, 33, 64]), st.integers(1, 70)), min_size=1, max_size=3)


def prefill(requests: Requests, attention: TorchAttention, spans: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
    """Do one prefill step: write the spans' tokens, then attend with their queries. Return the output of each row."""
    for row, span in spans.items():
        requests.write(row, *span)
    lengths, new = [last for _, last in spans.values()], [last - first for first, last in spans.values()]
    batch = PagedPrefill(requests.table(list(spans), max(lengths)), torch.tensor(list(spans)), lengths, new)
    query = torch.cat([requests.row_queries[row][first:last] for row, (first, last) in spans.items()])
    return list(attention.prefill(query, requests.cache, batch, requests.shape.scale).split(new))


def causal(requests: Requests, row: int) -> torch.Tensor:
    return causal_attention(
        requests.row_queries[row], requests.row_keys[row], requests.row_values[row], requests.shape.scale
    )


@settings(max_examples=40)
@given(lengths=SHORT_LENGTHS, shape=SHAPES, seed=SEEDS, data=st.data())
def test_prefill_in_chunks_is_causal_softmax_over_the_whole_row(
    lengths: list[int], shape: Shape, seed: int, data: st.DataObject
) -> None:
    requests, attention = Requests(lengths, shape, seed), TorchAttention(HybridConfig(), len(lengths), layers=1)
    left = [data.draw(chunks(length)) for length in lengths]
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(left):
        # a step has any combination of rows; the others pause
        waiting = [row for row, spans in enumerate(left) if spans]
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        parts = prefill(requests, attention, {row: left[row].pop(0) for row in chosen})
        for row, part in zip(chosen, parts, strict=True):
            outputs[row].append(part)
    for row, parts in enumerate(outputs):
        requests.assert_close(torch.cat(parts), causal(requests, row))


@pytest.mark.parametrize("policy", ["full", "scout"])
@settings(max_examples=15)
@given(prompts=SHORT_LENGTHS, shape=SHAPES, seed=SEEDS, steps=st.integers(1, 5))
def test_prefill_and_then_decode_is_causal_softmax_over_the_whole_row(
    policy: str, prompts: list[int], shape: Shape, seed: int, steps: int
) -> None:
    requests = Requests([n + steps for n in prompts], shape, seed)
    attention = TorchAttention(HybridConfig(policy=policy, budget_tokens=4 * T), len(prompts), layers=1)
    rows = list(range(len(prompts)))
    outputs = [[part] for part in prefill(requests, attention, {row: (0, prompts[row]) for row in rows})]
    for step in range(1, steps + 1):
        now = [n + step for n in prompts]
        for row in rows:
            requests.write(row, now[row] - 1, now[row])
        batch = requests.decode_batch(rows, now)
        attention.begin_decode(batch)
        query = torch.stack([requests.row_queries[row][now[row] - 1] for row in rows])
        out = attention.decode(query, requests.cache, batch, shape.scale)
        for row in rows:
            outputs[row].append(out[row : row + 1])
    for row in rows:
        requests.assert_close(torch.cat(outputs[row]), causal(requests, row))


# Policy scoutattention


def test_scoutattention_shares_a_selection_attends_to_it_alone_and_corrects_nothing() -> None:
    config = HybridConfig(policy="scoutattention", budget_tokens=6 * T, sink_blocks=1, recent_blocks=1)
    config = config.with_section(ScoutAttentionOptions(recall_interval=4))
    decoding, misses = Decoding([Life(0, 9 * T + 20, 0, 40)], SMALL, seed=5), RecordedMisses()
    context = PolicyContext(config, 1, 1, misses, PromptQueries(1), tuning_of(config, 1))
    policy = policy_named("scoutattention").create(context)
    assert isinstance(policy, ScoutPolicy)
    plain_config = config.with_section(ScoutOptions(recall_interval=4, resident_bonus=0.0, min_miss_attention=0.0))
    rules = ScoutRules(
        config.budget_tokens, per_layer=True, only_selected=True, shifts=False, recalls_by_real_query=False,
        early_recalls=0,
    )  # fmt: skip
    plain, missed = PlainScout(plain_config, rules, decoding, from_prompts=False), 0

    def check(step: Step) -> None:
        nonlocal missed
        assert step.guesses is not None
        for head in range(SMALL.heads):
            near, far = plain.attend(0, head, step.lengths[0], step.fresh[0], step.guesses[0], step.queries[0])
            assert len(near) + len(far) == 6
            missed += len(far)
            expected = attention_by_two_queries(decoding, False, step, 0, head, near, far)
            out = step.out[0].unflatten(0, (SMALL.heads, -1))[head]
            torch.testing.assert_close(out.double(), expected, **CLOSE[torch.float32])

    decoding.run(policy, check, lambda _: True)
    assert missed > 0


def test_scoutattention_predicts_by_raw_projections_unless_it_is_told_otherwise() -> None:
    paper = HybridConfig(policy="scoutattention")
    assert prediction_of(paper, is_calibrated=False) == prediction_of(paper, is_calibrated=True) == "raw"
    assert prediction_of(HybridConfig(policy="scoutattention", prediction="none"), is_calibrated=False) == "none"
    assert prediction_of(HybridConfig(), is_calibrated=False) == "none"
    assert prediction_of(HybridConfig(), is_calibrated=True) == "calibrated"
    assert prediction_of(HybridConfig(policy="full", prediction="raw"), is_calibrated=True) == "none"
