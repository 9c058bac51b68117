"""What a provider does: answer the posts of one mailbox, from ``start`` to ``stop``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from cpu_worker.engine import Regions
from sglang_hybrid.protocol.cores import Placement
from sglang_hybrid.protocol.messages import Planned, StatsReport, ThreadPlan


class ProviderError(RuntimeError):
    """The provider cannot be used here. The message says what to do."""


class Provider(ABC):
    """Started once. Every method but ``stop`` needs a started provider."""

    @abstractmethod
    def start(self, regions: Regions, plan: ThreadPlan, placement: Placement, failed: Callable[[str], None]) -> Planned:
        """Answer posts from now on; ``regions`` stay mapped until ``stop``.

        ``failed`` is called, from any thread, with a reason when the provider cannot go on after all.
        Raises ProviderError or NativeError; nothing runs then.
        """

    @abstractmethod
    def warm_up(self, cancelled: Callable[[], bool]) -> None:
        """Let the first post find everything ready: pages mapped, code loaded. Ends early when ``cancelled``.

        Raises OSError where the regions are not backed by memory.
        """

    @abstractmethod
    def stats(self) -> StatsReport: ...

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until what is posted now is answered. False: it was not in time."""

    @abstractmethod
    def stop(self) -> None:
        """End all threads, after the post they are at. Idempotent, and possible before ``start``."""
