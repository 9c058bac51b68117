"""Compute greedy tokens of a backend in one process, without a server, by the program ``greedy_texts.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def greedy(
    model: Path,
    backend: str,
    prompts: Sequence[Sequence[int]],
    steps: int,
    settings: list[list[str]],
    flags: Sequence[str] = (),
) -> list[list[list[int]]]:
    """Return tokens ``[settings][prompts][steps]``. ``backend`` and ``settings`` are those of ``greedy_texts.py``."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("greedy_texts.py")), str(model), backend, *flags],
        input=json.dumps({"prompts": [list(ids) for ids in prompts], "steps": steps, "settings": settings}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # several threads wait for each other longer than they compute
    )
    tokens: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])["tokens"]
    return tokens
