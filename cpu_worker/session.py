"""Session of one client, created by an attach request: the client's regions, and the provider that computes on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import msgspec

from cpu_worker import providers
from cpu_worker.engine import Regions
from cpu_worker.mapping import Mapping
from cpu_worker.providers import Provider
from cpu_worker.regions import Offer, RegionError, checked_size
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.protocol.core_claims import CoreClaims
from sglang_hybrid.protocol.cores import read_topology
from sglang_hybrid.protocol.messages import Planned, StatsReport, ThreadPlan


class SessionError(RuntimeError):
    """A request is not possible now. The message says what is missing."""


class Session:
    """Regions and provider of one client, until ``close``. ``offer.connection`` is the connection to the client."""

    def __init__(self, offer: Offer, owner: bytes, failed: Callable[[str], None]) -> None:
        """Map and check the two regions and close their descriptors.

        ``owner`` identifies the client that attached. ``failed`` is called with a reason, from any thread, when a
        provider cannot continue. Raise RegionError, NativeError or OSError if a region is refused; then nothing is
        mapped and the offer has not changed.
        """
        self.offer, self.owner = offer, owner
        self._failed = failed
        self._provider: Provider | None = None
        self._claims = CoreClaims()
        self._regions = _map(*offer.descriptors)
        offer.close_descriptors()

    @property
    def geometry(self) -> Geometry:
        return self._regions.geometry

    @property
    def serving(self) -> bool:
        return self._provider is not None

    @property
    def completed(self) -> int:
        return self._regions.completed

    def plan(self, plan: ThreadPlan) -> Planned:
        """Start a provider with these threads, after stopping the provider that ran before.

        Raise CoresError or ProviderError before anything has changed. Raise NativeError if the engine cannot be
        started; then no provider runs.
        """
        provider = providers.create(plan.provider)
        topology = replace(read_topology(), near=None if plan.near < 0 else plan.near)
        placement, taken = self._claims.claim(topology, plan.cores, plan.threads, plan.group_threads)
        self._stop_provider()
        try:
            planned = provider.start(self._regions, plan, placement, self._failed)
        except BaseException:
            provider.stop()
            self._claims.release()
            raise
        self._provider = provider
        return msgspec.structs.replace(planned, taken=sorted(taken))

    def warm_up(self, cancelled: Callable[[], bool]) -> None:
        self._running("warm-up").warm_up(cancelled)

    def stats(self) -> StatsReport:
        return self._running("stats").stats()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all current posts are answered. Return False after ``timeout_s``, and True if no provider runs."""
        return self._provider is None or self._provider.drain(timeout_s)

    def close(self) -> None:
        """Stop computing, unmap the regions and close the connection. Further calls do nothing."""
        self._stop_provider()
        self._claims.release()
        self._regions.mailbox.close()
        self._regions.pool.close()
        self.offer.close()

    def _running(self, request: str) -> Provider:
        if self._provider is None:
            raise SessionError(f"{request} needs a plan, send one first")
        return self._provider

    def _stop_provider(self) -> None:
        if self._provider is not None:
            self._provider.stop()
            self._provider = None


def _map(mailbox_fd: int, pool_fd: int) -> Regions:
    mailbox_size, pool_size = checked_size(mailbox_fd, "mailbox"), checked_size(pool_fd, "pool")
    mailbox = _map_one(mailbox_fd, mailbox_size, "mailbox", writable=True)
    try:
        # read-only, so that no fault of the worker can damage the KV cache
        pool = _map_one(pool_fd, pool_size, "pool", writable=False)
        try:
            geometry = Geometry()
            checked(library().sh_mailbox_check, mailbox.address, mailbox_size, pool_size, ctypes.byref(geometry))
            return Regions(mailbox, pool, geometry)
        except BaseException:
            pool.close()
            raise
    except BaseException:
        mailbox.close()
        raise


def _map_one(fd: int, size: int, name: str, *, writable: bool) -> Mapping:
    try:
        return Mapping(fd, size, writable=writable)
    except OSError as error:
        raise RegionError(f"the {name} of {size} bytes cannot be mapped: {error.strerror}") from error
