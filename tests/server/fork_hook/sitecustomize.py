"""Processes that SGLang asks Python to spawn are forked. See ``forking.py``."""

from __future__ import annotations

import multiprocessing
from typing import Any

_set_start_method = multiprocessing.set_start_method


def _fork_instead(method: str | None, **options: Any) -> None:
    _set_start_method("fork" if method == "spawn" else method, **options)


multiprocessing.set_start_method = _fork_instead  # type: ignore[assignment]
