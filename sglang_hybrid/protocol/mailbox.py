"""The scheduler's end of a mailbox; ``kernels/cpu/include/sglang_hybrid/mailbox.h`` defines what is in it."""

from __future__ import annotations

import ctypes
import weakref

from sglang_hybrid.ops.cpu.library import checked, library, mailbox_fields
from sglang_hybrid.ops.cpu.lists import HostWork
from sglang_hybrid.ops.cpu.structs import Geometry, MailboxLayout
from sglang_hybrid.protocol.region import SharedRegion

SLOTS = 2  # posts that can be on their way at a time
SERVED, DAMAGED = 1, 2  # sh_outcome of c_api.h; 0 is late


def layout_of(geometry: Geometry) -> MailboxLayout:
    """Where things are in a mailbox. Raises NativeError when the geometry cannot be served."""
    layout = MailboxLayout()
    checked(library().sh_mailbox_layout, ctypes.byref(geometry), ctypes.byref(layout))
    return layout


class Mailbox:
    """A mailbox in a region of its own. For one thread at a time.

    Each life of a worker gets a new one: whatever a worker that was given up still writes, it
    writes where nobody looks.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Raises RegionError when there is no memory, NativeError when the geometry cannot be served."""
        self._library = library()
        self.geometry, self.layout = geometry, layout_of(geometry)
        self.region = SharedRegion(self.layout.bytes, name="sglang-hybrid-mailbox", others_write=True)
        address = ctypes.c_void_p(self.region.address)
        checked(self._library.sh_mailbox_create, address, self.region.size, ctypes.byref(geometry))
        self._client = checked(self._library.sh_client_open, address, ctypes.byref(geometry))
        weakref.finalize(self, self._library.sh_client_close, self._client)
        self.posted = 0  # sequence number of the newest post

    def post(self, lists: HostWork, generation: int) -> int:
        """Post one layer; its sequence number."""
        sequence = ctypes.c_uint64()
        checked(
            self._library.sh_client_post,
            self._client, ctypes.byref(lists.struct), generation & 0xFFFFFFFF, ctypes.byref(sequence),
        )  # fmt: skip
        self.posted = sequence.value
        return self.posted

    def collect(self, sequence: int, lists: HostWork, timeout_s: float, gone: ctypes.c_uint32) -> int:
        """Wait for the replies to a post and copy them to ``lists``; the number of rows that are not served.

        Ends early when another thread sets ``gone``. ``lists.outcome`` says what became of each row.
        """
        if not 0 <= self.posted - sequence < SLOTS:  # overwritten: nothing of it is left
            lists.outcome.fill_(DAMAGED)
            return lists.rows
        missing: int = self._library.sh_client_collect(
            self._client, sequence, int(timeout_s * 1e9), ctypes.byref(gone), *lists.results,
            ctypes.c_void_p(lists.outcome.data_ptr()),
        )  # fmt: skip
        return missing

    def wake(self) -> None:
        self._library.sh_client_wake(self._client)

    @property
    def caught_up(self) -> bool:
        """Whether the worker is through with everything that was posted."""
        return self.completed == self.posted

    @property
    def completed(self) -> int:
        """Sequence number of the newest post that the worker is through with; 0: it has answered nothing."""
        return int(self._library.sh_client_completed(self._client))

    def wait_for_end(self, timeout_s: float) -> bool:
        """Whether the worker's lead thread ends in that time. For workers whose engine has threads: provider native."""
        return bool(self._library.sh_client_wait_for_end(self._client, int(timeout_s * 1e9)))

    def give_up(self) -> None:
        """Nobody answers any more: who waits for replies, a GPU too, stops waiting."""
        offset, _ = mailbox_fields()["ClientLine"]["gone"]
        ctypes.c_uint64.from_address(self.region.address + self.layout.client + offset).value = 1

    @property
    def bell(self) -> int:
        """Sequence number of the newest post, whoever posted it: this client, or a GPU."""
        offset, _ = mailbox_fields()["Bell"]["posted"]
        return ctypes.c_uint64.from_address(self.region.address + self.layout.bell + offset).value

    @property
    def heartbeat(self) -> int:
        return int(self._library.sh_client_heartbeat(self._client))
