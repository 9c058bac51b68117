"""Commands that run programs of the repository. They work in a checkout only: wheels do not contain the programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_hybrid.origin import ROOT


def run(module: str, command: str, arguments: Sequence[str]) -> int:
    """Replace this process by ``module`` of the checkout (exec). Return exit status 2 if there is no checkout."""
    if not (ROOT / module.replace(".", os.sep)).is_dir():
        print(f"{command} is part of the repository, not of the package: call it in a checkout", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main(arguments: Sequence[str]) -> int:
    """Run ``sglang-hybrid chaos``: the package ``bench.chaos`` of the checkout."""
    return run("bench.chaos", "sglang-hybrid chaos", arguments)
