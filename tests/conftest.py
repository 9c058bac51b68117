"""Which tests run at the same time: ``make test`` has two processes, file by file, for all that are not ``alone``."""

from __future__ import annotations

from pathlib import Path

import pytest

# they measure time, or look at everything that runs on the machine
ALONE = ("test_lifecycle", "test_worker_faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    server = Path(__file__).with_name("server")
    for item in items:
        if item.path.parent == server and item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)
