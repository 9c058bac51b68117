"""Mailbox client on the GPU: kernels post the misses of a layer to the worker and wait for the replies.

The host creates the mailbox and attaches it, a new one for each worker process that it starts. A GPU cannot wake an
idle worker, so the host wakes the worker before it launches kernels that post. All state that changes from post to post
is in device memory, so a CUDA graph with posts and waits can be replayed, also after the worker was restarted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cpu.dtypes import query_dtype
from sglang_hybrid.ops.cpu.structs import MASKS, VALUE_SUMS, Geometry
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.ops.cuda.library import checked, launch, library
from sglang_hybrid.ops.cuda.structs import OUTCOMES, STRUCTS, WAIT_BOUNDS
from sglang_hybrid.ops.cuda.tensors import active_address, address
from sglang_hybrid.protocol.mailbox import Mailbox, layout_of

_STATE = STRUCTS["sh_mailbox_state"]
_BUCKETS = len(WAIT_BOUNDS) + 1
COUNTS = 2 * len(OUTCOMES) + _BUCKETS + 1  # number of counters that the kernels update


@dataclass(frozen=True)
class MailboxCounts:
    """Counters of posted rows and of waits since the client was created."""

    rows: dict[str, int]  # posted rows by outcome
    blocks: dict[str, int]  # blocks of these rows, by outcome of the row
    waits: tuple[int, ...]  # histogram of the waiting times of steps that asked the worker; bounds are WAIT_BOUNDS
    waited_s: float  # total waiting time of these steps

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """Return the counters in ``numbers``, a host copy of ``DeviceMailboxClient.counts``."""
        first, second = len(OUTCOMES), 2 * len(OUTCOMES)
        rows, blocks = (dict(zip(OUTCOMES, part, strict=True)) for part in (numbers[:first], numbers[first:second]))
        return cls(rows, blocks, tuple(numbers[second : second + _BUCKETS]), numbers[second + _BUCKETS] / 1e9)


class DeviceMailboxClient:
    """Mailbox client of one device. Posts run one after the other; a wait may run concurrently with the next post.

    All mailboxes that are attached to a client must have the same geometry.
    """

    def __init__(self, geometry: Geometry, device: torch.device | str = "cuda") -> None:
        """Allocate the client's state on ``device``. Raises NativeError if the geometry is not supported."""
        self._geometry = geometry
        self._layout = layout_of(geometry)
        self._state = torch.zeros(ctypes.sizeof(_STATE), dtype=torch.uint8, device=device)
        self._layer_waits = torch.zeros(geometry.layers, dtype=torch.int64, device=device)
        self._registered: RegisteredRegion | None = None
        self._heads = geometry.kv_heads * geometry.group
        self._dtype = query_dtype(geometry)

    def attach(self, mailbox: Mailbox | None) -> None:
        """Use ``mailbox`` from the next launch on. None detaches: all rows are withheld, which means not posted.

        If a mailbox was attached before, this waits for the current stream. Raises ValueError for another geometry.
        """
        if mailbox is not None and bytes(mailbox.geometry) != bytes(self._geometry):
            raise ValueError("the mailbox has another geometry")
        if self._registered is not None:
            self._tell(0, 0)
            torch.cuda.current_stream().synchronize()  # launched kernels have finished with the old mailbox
            self._registered.close()
            self._registered = None
        if mailbox is not None:
            self._registered = RegisteredRegion(mailbox.region)
            self._tell(self._registered.device_address, mailbox.bell)

    def _tell(self, device_address: int, sequence: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        checked(library().sh_cuda_mailbox_attach, self._state.data_ptr(), device_address, sequence, stream)

    def new_receipt(self, batch: int) -> torch.Tensor:
        """Allocate a receipt, which passes data from ``post`` to ``wait``. Each post in flight needs its own."""
        return torch.zeros(self._receipt_bytes(batch), dtype=torch.uint8, device=self._state.device)

    def receipt_of_batch(self, receipt: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the part of a receipt that a smaller batch needs, in the same memory."""
        return receipt[: self._receipt_bytes(batch)]

    def _receipt_bytes(self, batch: int) -> int:
        kv_heads: int = self._geometry.kv_heads
        return ctypes.sizeof(STRUCTS["sh_receipt"]) + 4 * batch * (1 + kv_heads)

    def post(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        counts: torch.Tensor,
        last_fill: torch.Tensor,
        layer: int,
        scale: float,
        receipt: torch.Tensor,
        *,
        begins_step: bool,
        active_rows: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
    ) -> None:
        """Post one layer. Lists: pages ``[B, H, N]``, counts and last_fill ``[B, H]``, int32; query ``[B, H * G, D]``.

        ``last_fill``: tokens in a list's last block; all other blocks are full. ``begins_step`` must be set for one
        post of a decode step, which comes before all waits of the step. Lists are not checked here: the worker refuses
        rows that are out of bounds. ``masks`` ``[B, H, N]``, int32: token t of a block is attended only if bit t of the
        block's mask is set. Raises ValueError if masks are given and the geometry has none.
        """
        g = self._geometry
        if masks is not None and not g.flags & MASKS:
            raise ValueError("the mailbox has no masks: the policy has to declare Needs(masks=True)")
        batch, listed = query.shape[0], pages.shape[2]
        self._post(
            pages, counts, layer, receipt, begins_step, active_rows,
            query=address("query", query, self._dtype, (batch, self._heads, g.head_dim)),
            last_fill=address("last_fill", last_fill, torch.int32, (batch, g.kv_heads)),
            masks=None if masks is None else address("masks", masks, torch.int32, (batch, g.kv_heads, listed)),
            scale=scale,
            weight_blocks=0,
        )  # fmt: skip

    def post_sums(
        self,
        weights: torch.Tensor,
        positions: torch.Tensor,
        pages: torch.Tensor,
        counts: torch.Tensor,
        layer: int,
        receipt: torch.Tensor,
        *,
        begins_step: bool,
        active_rows: torch.Tensor | None = None,
    ) -> None:
        """Post one layer whose values the worker sums by given weights; block i uses the weights of ``positions[i]``.

        weights ``[B, H, G, blocks, 32]`` float32; positions and pages ``[B, H, N]``, counts ``[B, H]``, int32. The
        worker refuses a row if one of its lists is longer than the mailbox allows. Replies have LSE 0 where a list has
        blocks. Raises ValueError if the geometry has no value sums.
        """
        g = self._geometry
        if not g.flags & VALUE_SUMS:
            raise ValueError("the mailbox has no weights: the policy has to declare Needs(value_sums=True)")
        batch, listed, blocks = pages.shape[0], pages.shape[2], weights.shape[3]
        of_weights = (batch, g.kv_heads, g.group, blocks, BLOCK_TOKENS)
        self._post(
            pages, counts, layer, receipt, begins_step, active_rows,
            weights=address("weights", weights, torch.float32, of_weights),
            positions=address("positions", positions, torch.int32, (batch, g.kv_heads, listed)),
            scale=1.0,
            weight_blocks=blocks,
        )  # fmt: skip

    def _post(
        self,
        pages: torch.Tensor,
        counts: torch.Tensor,
        layer: int,
        receipt: torch.Tensor,
        begins_step: bool,
        active_rows: torch.Tensor | None,
        **of_kind: Any,
    ) -> None:
        """Launch a post. ``of_kind``: fields of ``sh_mailbox_post`` that depend on the kind of post."""
        g = self._geometry
        batch, _, listed = pages.shape
        launch(
            "mailbox_post",
            state=self._state.data_ptr(),
            receipt=address("receipt", receipt, torch.uint8, (self._receipt_bytes(batch),)),
            pages=address("pages", pages, torch.int32, (batch, g.kv_heads, listed)),
            counts=address("counts", counts, torch.int32, (batch, g.kv_heads)),
            active_rows=active_address(active_rows),
            layer_waits=self._layer_waits.data_ptr(),
            geometry=g,
            layout=self._layout,
            batch=batch,
            listed=listed,
            layer=layer,
            begins_step=begins_step,
            **of_kind,
        )

    def wait(
        self, receipt: torch.Tensor, deadline_s: float, out: torch.Tensor, lse: torch.Tensor, served: torch.Tensor
    ) -> None:
        """Wait for the replies to a post: out ``[B, H * G, D]`` and lse ``[B, H * G]`` float32, served ``[B]`` int32.

        A row without a reply at the deadline gets LSE -inf and ``served`` 0: the caller must compute its misses in
        another way. A row without blocks counts as served, with LSE -inf. Rows that were not active in the post are not
        written.
        """
        g = self._geometry
        batch = out.shape[0]
        launch(
            "mailbox_wait",
            state=self._state.data_ptr(),
            receipt=address("receipt", receipt, torch.uint8, (self._receipt_bytes(batch),)),
            out=address("out", out, torch.float32, (batch, self._heads, g.head_dim)),
            lse=address("lse", lse, torch.float32, (batch, self._heads)),
            served=address("served", served, torch.int32, (batch,)),
            layer_waits=self._layer_waits.data_ptr(),
            deadline_ns=int(deadline_s * 1e9),
            geometry=g,
            layout=self._layout,
            batch=batch,
        )

    @property
    def counts(self) -> torch.Tensor:
        """Counters ``[COUNTS]`` int64 in device memory, see ``MailboxCounts``. The next step counts a step's wait."""
        first = _STATE.outcomes.offset
        return self._state[first : first + 8 * COUNTS].view(torch.int64)

    def read_state(self) -> Any:
        """Return a host copy of the kernels' state (``sh_mailbox_state``). Waits for the current stream."""
        return _STATE.from_buffer_copy(self._state.cpu().numpy().tobytes())

    def outcomes(self) -> dict[str, int]:
        """Return the number of posted rows so far by outcome. Waits for the current stream."""
        return dict(zip(OUTCOMES, self.read_state().outcomes, strict=True))
