"""SGLang's benchmark of a server, loaded ahead: its imports take as long as a server's start, so both happen at once.

python -m bench.serving.late_benchmark FILE [flags of sglang.benchmark.serving]     begins once FILE is there
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from sglang.benchmark.serving import cli_main


def main() -> None:
    parent, go = os.getppid(), Path(sys.argv.pop(1))
    while not go.exists():
        if os.getppid() != parent:  # nobody is left who could say so
            return
        time.sleep(0.1)
    cli_main()


if __name__ == "__main__":
    main()
