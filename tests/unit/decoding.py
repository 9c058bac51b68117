"""Test requests in a paged host pool, and a loop that decodes them token by token in the order of SGLang's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention_oracle import Tolerance, seeded, softmax_attention

from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.memory.digests import Digests
from sglang_hybrid.memory.pages import page_table, touched_pages
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.policies.base import DecodePolicy

T = 32  # tokens per block
# results are computed in float32 and rounded to the query's dtype at the end
CLOSE: dict[torch.dtype, Tolerance] = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@dataclass(frozen=True)
class Shape:
    heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None  # None: `dtype`

    @property
    def pool(self) -> torch.dtype:
        return self.pool_dtype or self.dtype

    @property
    def scale(self) -> float:
        return float(1.2 * self.dim**-0.5)  # differs from torch's default scale


class Requests:
    """Rows with random keys, values and queries, and a host pool to which tests write the rows' tokens part by part.

    Keys and values are numbers that the pool's dtype can represent. In the pool and in the digests, everything that no
    token was written to is NaN. Pages are in random order. Beyond a row's end, its page table lists other rows' pages.
    """

    def __init__(self, lengths: list[int], shape: Shape, seed: int) -> None:
        random, self.shape, self.lengths = seeded(seed), shape, lengths
        heads, longest = shape.heads, max(lengths)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random).to(shape.dtype)

        self.row_keys = [normal(heads, n, shape.dim).to(shape.pool).to(shape.dtype) for n in lengths]
        self.row_values = [normal(heads, n, shape.value_dim).to(shape.pool).to(shape.dtype) for n in lengths]
        self.row_queries = [self._as_part_of_qkv(normal, n) for n in lengths]

        counts = [-(-n // T) for n in lengths]
        pages = 1 + torch.randperm(sum(counts) + 2, generator=random)  # page 0 is for padding, two stay unused
        table = pages[torch.randint(0, len(pages), (len(lengths), -(-longest // T)), generator=random)]
        for row, own in enumerate(pages[: sum(counts)].split(counts)):
            table[row, : len(own)] = own
        self._req_to_token = (table[:, :, None] * T + torch.arange(T)).flatten(1).to(torch.int32)

        nan = float("nan")
        self._digests = Digests(1, len(pages) + 1, heads, shape.dim, shape.pool, "cpu")
        self._digests.of_layer(0).fill_(nan)
        self.cache = LayerCache(
            torch.full((len(pages) + 1, heads, T, shape.dim), nan, dtype=shape.pool),
            torch.full((len(pages) + 1, heads, T, shape.value_dim), nan, dtype=shape.pool),
            self._digests.of_layer(0),
        )

    def _as_part_of_qkv(self, normal: Callable[[int, int], torch.Tensor], tokens: int) -> torch.Tensor:
        """Return queries ``[n, H * G, D]`` as a model makes them: a slice of a wider projection, so not contiguous."""
        width = self.shape.heads * self.shape.group * self.shape.dim
        queries: torch.Tensor = normal(tokens, width + 24)[:, :width].unflatten(1, (-1, self.shape.dim))
        return queries

    def write(self, row: int, first: int, last: int) -> None:
        """Write the row's tokens from ``first`` up to but not including ``last`` to the pool, as the KV pool does."""
        slots = self._req_to_token[row, first:last].to(torch.int64)
        keys = self.row_keys[row][:, first:last].transpose(0, 1)
        self.cache.keys[slots // T, :, slots % T] = keys.to(self.shape.pool)
        values = self.row_values[row][:, first:last].transpose(0, 1)
        self.cache.values[slots // T, :, slots % T] = values.to(self.shape.pool)
        self._digests.refresh(0, self.cache.keys, *touched_pages(slots, T))

    def write_all(self) -> None:
        for row, length in enumerate(self.lengths):
            self.write(row, 0, length)

    def table(self, rows: list[int], longest: int) -> torch.Tensor:
        return page_table(self._req_to_token, torch.tensor(rows), longest, T)

    def decode_batch(
        self, rows: list[int] | None = None, lengths: list[int] | None = None, numbers: list[int] | None = None
    ) -> DecodeBatch:
        """Return a batch of ``rows`` at ``lengths``, under SGLang's row ``numbers``; by default of all rows in full."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        lengths = [self.lengths[row] for row in rows] if lengths is None else lengths
        numbers = rows if numbers is None else numbers
        table = self.table(rows, max(lengths))
        return DecodeBatch(table, torch.tensor(lengths), lengths, torch.tensor(numbers), numbers)

    def last_queries(self) -> torch.Tensor:
        return torch.stack([queries[-1] for queries in self.row_queries])

    def full_attention(self) -> torch.Tensor:
        """Return the full attention of each row's last token: ``[rows, H * G, Dv]`` in float64."""
        rows = zip(self.last_queries(), self.row_keys, self.row_values, strict=True)
        return torch.stack([softmax_attention(*row, self.shape.scale)[0] for row in rows])

    def assert_close(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        assert out.dtype == self.shape.dtype
        torch.testing.assert_close(out.double(), expected, **CLOSE[self.shape.dtype])


@dataclass(frozen=True)
class Life:
    """The plan of one request: its row number in SGLang, its first step, and its number of decode steps."""

    number: int
    prompt: int  # tokens
    first: int
    steps: int


@dataclass(frozen=True)
class Step:
    """Inputs and output of one decode step."""

    requests: list[int]  # indices of requests, in the order of the batch's rows
    fresh: list[bool]  # whether this is the request's first step
    lengths: list[int]
    queries: torch.Tensor
    guesses: torch.Tensor | None  # passed to ``ahead`` before the new token was written
    out: torch.Tensor


class Decoding:
    """Requests that begin and end as planned, decoded by one policy in the order of SGLang's calls."""

    def __init__(self, plan: list[Life], shape: Shape, seed: int) -> None:
        self.plan = plan
        self.requests = Requests([life.prompt + life.steps for life in plan], shape, seed)
        self._random = seeded(seed + 1)
        self.last_step = max(life.first + life.steps for life in plan)

    def guess(self, real_queries: torch.Tensor) -> torch.Tensor:
        """Return a random query that has nothing to do with the real one, to stand for a bad prediction."""
        return (3 * torch.randn(real_queries.shape, generator=self._random)).to(real_queries.dtype)

    def prompt_query(self, request: int) -> torch.Tensor:
        return self.requests.row_queries[request][self.plan[request].prompt - 1]

    def run(
        self,
        policy: DecodePolicy,
        check: Callable[[Step], None],
        predicted: Callable[[int], bool],
        prompts: PromptQueries | None = None,
        shuffled: bool = True,
    ) -> None:
        """Decode all planned steps, and call ``check`` after each of them.

        ``predicted`` says in which steps the policy's ``ahead`` is called. ``prompts`` gets each prompt's last query.
        """
        requests, scale = self.requests, self.requests.shape.scale
        for now in range(self.last_step):
            alive = [r for r, life in enumerate(self.plan) if life.first <= now < life.first + life.steps]
            if not alive:
                continue
            if shuffled:
                alive = [alive[i] for i in torch.randperm(len(alive), generator=self._random).tolist()]
            fresh = [self.plan[r].first == now for r in alive]
            for request in (r for r, new in zip(alive, fresh, strict=True) if new):
                number = self.plan[request].number
                requests.write(request, 0, self.plan[request].prompt)
                policy.reset_rows([number])
                if prompts:
                    prompts.store(0, torch.tensor([number]), self.prompt_query(request)[None])
            lengths = [self.plan[r].prompt + now - self.plan[r].first + 1 for r in alive]
            batch = requests.decode_batch(alive, lengths, [self.plan[r].number for r in alive])
            queries = torch.stack([requests.row_queries[r][n - 1] for r, n in zip(alive, lengths, strict=True)])
            guesses = self.guess(queries) if predicted(now) else None
            policy.begin_step(batch)
            if guesses is not None:
                policy.ahead(guesses, requests.cache, batch, scale)
            for request, length in zip(alive, lengths, strict=True):
                requests.write(request, length - 1, length)
            out = policy.decode(queries, requests.cache, batch, scale)
            check(Step(alive, fresh, lengths, queries, guesses, out))
