"""Which tests run at the same time: ``make test`` has two processes, file by file, for all that are not ``alone``."""

from __future__ import annotations

from pathlib import Path

import pytest

# they measure time, look at everything that runs on the machine, or want the worker to be in time for every row
ALONE = ("test_exactness", "test_lifecycle", "test_worker_faults")
# minutes each: first, so that at the end both processes have something to do (and --no-loadscope-reorder keeps it so)
LONG = ("test_pd", "test_cuda_emulated", "test_pd_faults", "test_cuda_build", "test_budget")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    server = Path(__file__).with_name("server")
    for item in items:
        if item.path.parent == server and item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
