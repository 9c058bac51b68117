"""Population of this process's page table with a large mapping, in the background.

A worker that replaces another one can so answer posts at once. Until the population has finished, each page not touched
yet costs a page fault. Populating the whole pool first would make all posts wait, the longer the larger the pool is.
"""

from __future__ import annotations

import logging
import os
import threading

from cpu_worker.mapping import Mapping

_LOWEST_PRIORITY = 19

log = logging.getLogger(__name__)


class Population:
    """A thread that populates ``mapping`` from construction on. Call ``stop`` before the mapping is closed."""

    def __init__(self, mapping: Mapping) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(mapping,), name="hybrid-populate", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started: page faults map the pages one by one
            log.warning("the pool's pages are mapped when they are first read: %s", error)
            self._thread = None

    def stop(self) -> None:
        """End the thread and wait for it. Further calls do nothing."""
        self._stopping.set()
        if self._thread:
            self._thread.join()
            self._thread = None

    def _run(self, mapping: Mapping) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            mapping.populate(1, self._stopping.is_set)
        except OSError as error:
            log.warning("the pool's pages are mapped when they are first read: %s", error)
