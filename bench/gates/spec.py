"""What the parent tells a child, and how files come and go between them."""

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
    flags: list[str]  # SGLang's
    variants: list[tuple[str, list[str]]]  # of hybrid
    steps: int
    cases: str  # files
    reference: str
    out: str
    turn: str
    timeout: float
    is_fp8: bool = False  # the KV cache


def write_whole(path: Path, content: Any) -> None:
    """Nobody sees half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    os.replace(part, path)
