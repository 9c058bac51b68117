"""Loads SGLang's server benchmark once and runs it many times: its imports take as long as a server's start.

python -m bench.serving.late_benchmark FOLDER

Run N starts in a fork of this process once FOLDER/N.json exists, a list of flags of sglang.benchmark.serving. Its exit
status is written to FOLDER/N.status.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from sglang.benchmark.serving import cli_main


def main() -> None:
    parent, folder, number = os.getppid(), Path(sys.argv[1]), 0
    while os.getppid() == parent:  # without the parent no process is left that could ask for runs
        asked = folder / f"{number}.json"
        if not asked.exists():
            time.sleep(0.1)  # no event to wait for: another program writes
            continue
        status = run(json.loads(asked.read_text()))
        told = folder / f"{number}.told"
        told.write_text(str(status))
        told.rename(folder / f"{number}.status")
        number += 1


def run(flags: list[str]) -> int:
    """Run the benchmark in a forked process and return its exit status: it keeps its arguments in a global variable."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = 1
        try:
            sys.argv[1:] = flags
            cli_main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
