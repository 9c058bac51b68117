"""The scheduler's end of a mailbox. ``kernels/cpu/include/sglang_hybrid/mailbox.h`` defines the layout of a mailbox."""

from __future__ import annotations

import ctypes
import weakref

from sglang_hybrid.ops.cpu.library import checked, library, mailbox_fields
from sglang_hybrid.ops.cpu.lists import HostWork
from sglang_hybrid.ops.cpu.structs import Geometry, MailboxLayout
from sglang_hybrid.protocol.region import SharedRegion

SERVED, DAMAGED, OVERWRITTEN = 1, 2, 3  # sh_outcome of c_api.h; 0 is late


def layout_of(geometry: Geometry) -> MailboxLayout:
    """Return the layout of a mailbox. Raise NativeError if the kernels do not support the geometry."""
    layout = MailboxLayout()
    checked(library().sh_mailbox_layout, ctypes.byref(geometry), ctypes.byref(layout))
    return layout


class Mailbox:
    """A mailbox in a shared region of its own. Only one thread may use it at a time.

    Each worker process that is attached gets a new mailbox. So a worker that was given up can only write to a mailbox
    that is not read any more.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Create the mailbox. Raise RegionError if memory is short, NativeError if no kernel supports the geometry."""
        self._library = library()
        self.geometry, self.layout = geometry, layout_of(geometry)
        self.region = SharedRegion(self.layout.bytes, name="sglang-hybrid-mailbox", others_write=True)
        address = ctypes.c_void_p(self.region.address)
        checked(self._library.sh_mailbox_create, address, self.region.size, ctypes.byref(geometry))
        self._client = checked(self._library.sh_client_open, address, ctypes.byref(geometry))
        weakref.finalize(self, self._library.sh_client_close, self._client)
        self.posted = 0  # sequence number of this client's newest post

    def post(self, lists: HostWork, generation: int) -> int:
        """Post one layer and return its sequence number. ``generation`` is the number of the decode step."""
        sequence = ctypes.c_uint64()
        checked(
            self._library.sh_client_post,
            self._client, ctypes.byref(lists.struct), generation & 0xFFFFFFFF, ctypes.byref(sequence),
        )  # fmt: skip
        self.posted = sequence.value
        return self.posted

    def collect(self, sequence: int, lists: HostWork, timeout_s: float, gone: ctypes.c_uint32) -> int:
        """Wait for the replies to a post, copy them to ``lists``, and return the number of rows that are not served.

        The wait ends early when another thread sets ``gone``. ``lists.outcome`` gets the outcome of each row. The two
        newest posts can be collected; all rows of an older one are ``OVERWRITTEN``.
        """
        missing: int = self._library.sh_client_collect(
            self._client, sequence, lists.rows, int(timeout_s * 1e9), ctypes.byref(gone), *lists.results,
            ctypes.c_void_p(lists.outcome.data_ptr()),
        )  # fmt: skip
        return missing

    def wake(self) -> None:
        self._library.sh_client_wake(self._client)

    @property
    def caught_up(self) -> bool:
        """Return True if the worker has answered or given up every post of this client."""
        return self.completed == self.posted

    @property
    def completed(self) -> int:
        """Return the sequence number up to which the worker has answered or given up all posts. 0 means none yet."""
        return int(self._library.sh_client_completed(self._client))

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return True if the worker's lead thread ends within ``timeout_s``. Only provider native has such a thread."""
        return bool(self._library.sh_client_wait_for_end(self._client, int(timeout_s * 1e9)))

    def give_up(self) -> None:
        """Mark the worker as gone, so that a GPU that waits for replies stops waiting."""
        offset, _ = mailbox_fields()["ClientLine"]["gone"]
        ctypes.c_uint64.from_address(self.region.address + self.layout.client + offset).value = 1

    @property
    def bell(self) -> int:
        """Return the sequence number of the newest post, of this client or of a GPU."""
        offset, _ = mailbox_fields()["Bell"]["posted"]
        return ctypes.c_uint64.from_address(self.region.address + self.layout.bell + offset).value

    @property
    def heartbeat(self) -> int:
        return int(self._library.sh_client_heartbeat(self._client))
