"""Settings that gpu_gates.py passes to a child process, and an atomic write for files that they share."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "gates: "


@dataclass(frozen=True)
class Spec:
    role: str  # stock, control or hybrid
    device: str
    flags: list[str]  # SGLang's server flags
    variants: list[tuple[str, list[str]]]  # name and settings of each variant of hybrid
    steps: int
    cases: str  # file with the prompts
    reference: str  # file that the stock process writes
    out: str  # file for this process's results
    turn: str  # file that a process locks while it computes
    timeout: float  # seconds
    is_fp8: bool = False  # dtype of the KV cache


def write_whole(path: Path, content: Any) -> None:
    """Write ``content`` as JSON to ``path`` atomically, so that a reader never sees a part of the file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    os.replace(part, path)
