"""Interface of providers, which answer the posts of one mailbox from ``start`` to ``stop``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from cpu_worker.engine import Regions
from sglang_hybrid.protocol.cores import Placement
from sglang_hybrid.protocol.messages import Planned, StatsReport, ThreadPlan


class ProviderError(RuntimeError):
    """The provider cannot be used on this machine. The message says what to do."""


class Provider(ABC):
    """Answers the posts of one mailbox. ``start`` is called once; all other methods but ``stop`` need it before."""

    @abstractmethod
    def start(self, regions: Regions, plan: ThreadPlan, placement: Placement, failed: Callable[[str], None]) -> Planned:
        """Start to answer posts. The caller keeps ``regions`` mapped until ``stop``.

        ``failed`` is called, from any thread, with a reason when the provider cannot continue later.
        Raise ProviderError or NativeError if the provider cannot start; then nothing runs.
        """

    @abstractmethod
    def warm_up(self, cancelled: Callable[[], bool]) -> None:
        """Map the regions' pages, or start to, and load code, so that the first post does not wait for this.

        Return early when ``cancelled`` returns True. Raise OSError if the regions are not backed by memory.
        """

    @abstractmethod
    def stats(self) -> StatsReport: ...

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until all current posts are answered. Return False if this takes longer than ``timeout_s``."""

    @abstractmethod
    def stop(self) -> None:
        """End all threads after their current post. May be called several times, and before ``start``."""
