"""Enters a large mapping into this process's page table while it is in use already.

A worker that takes another's place serves at once: pages that nobody has touched yet cost a fault each until this is
through, instead of keeping all of them waiting for as long as the pool is large.
"""

from __future__ import annotations

import logging
import os
import threading

from cpu_worker.mapping import Mapping

_LOWEST_PRIORITY = 19

log = logging.getLogger(__name__)


class Population:
    """Begins at once, in a thread of its own. ``stop`` it before the mapping is closed."""

    def __init__(self, mapping: Mapping) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(mapping,), name="hybrid-populate", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to be had: faults do it, one by one
            log.warning("the pool's pages are mapped when they are first read: %s", error)
            self._thread = None

    def stop(self) -> None:
        """Idempotent."""
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
