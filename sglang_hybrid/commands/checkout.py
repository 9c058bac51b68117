"""Programs of the repository that have a command here, too. They are for checkouts: wheels do not contain them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_hybrid.origin import ROOT


def run(module: str, command: str, arguments: Sequence[str]) -> int:
    """Run ``module`` of the checkout in place of this process. Returns the exit status where there is no checkout."""
    if not (ROOT / module.replace(".", os.sep)).is_dir():
        print(f"{command} is part of the repository, not of the package: call it in a checkout", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main(arguments: Sequence[str]) -> int:
    """``sglang-hybrid chaos``"""
    return run("bench.chaos", "sglang-hybrid chaos", arguments)
