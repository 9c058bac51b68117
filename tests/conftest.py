"""Order of the test files, and their distribution to the processes of pytest-xdist.

``make test`` runs two processes. All tests of a file run in the same process. Servers that several files use are
started once for both processes (``made_once.py``) and end with the test run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import made_once
import pytest
from xdist.scheduler import LoadScopeScheduling

# Files of minutes each start first, so that no process is idle at the end (--no-loadscope-reorder keeps this order).
LONG = (
    "test_exactness", "test_pd", "test_pd_faults", "test_chaos", "test_cuda_build", "test_switches", "test_console",
    "test_lifecycle", "test_features", "test_sanitizers", "test_decoder_layers", "test_worker_faults",
    "test_cuda_emulated",
)  # fmt: skip
# Any process may run any test of these files: what the tests share is built once for all processes.
SPREAD = ("test_cuda_emulated",)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Scheduler that runs all tests of a file in one process, one after the other, except for files in SPREAD."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if Path(file).stem in SPREAD else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the main process: the others inherit its environment
        config.stash[_SHARED] = tempfile.TemporaryDirectory(prefix="sglang-hybrid-tests-")
        os.environ[made_once.FOLDER] = config.stash[_SHARED].name


def pytest_unconfigure(config: pytest.Config) -> None:
    if shared := config.stash.get(_SHARED, None):
        made_once.end_servers(Path(shared.name))
        shared.cleanup()


_SHARED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
