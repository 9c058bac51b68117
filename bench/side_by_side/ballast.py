"""Allocates GPU memory, so that a large card has only as much free memory as a small one.

    python -m bench.side_by_side.ballast BYTES FILE     leaves BYTES free, then writes FILE; ends with its parent

A limit set by flags is only a promise of the measured server. With ballast, a server that wants more memory fails.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from sglang_hybrid.commands.pd.processes import ServerProcess, end_all, wait_until

_SECONDS = 120


class Ballast:
    """Process that allocates GPU memory. Use as a context manager: ``leave`` bytes of the first GPU are free inside."""

    def __init__(self, leave: int, folder: Path) -> None:
        self._leave, self._folder = leave, folder

    def __enter__(self) -> Ballast:
        ready = self._folder / "ballast.ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.side_by_side.ballast", str(self._leave), str(ready)]
        self._member = ServerProcess("ballast", command, self._folder / "ballast.log", {})
        try:
            wait_until([self._member], ready.is_file, _SECONDS, "the ballast was not allocated")
        except BaseException:
            end_all([self._member])
            raise
        self.bytes = int(ready.read_text())
        return self

    def __exit__(self, *_: object) -> None:
        end_all([self._member])


def bytes_to_take(free: int, leave: int) -> int:
    """Return the bytes to allocate so that ``leave`` stay free. Raise ValueError if fewer are free already."""
    if free < leave:
        raise ValueError(f"{free / 1e9:.2f} GB of GPU memory are free, less than the {leave / 1e9:.2f} GB to leave")
    return free - leave


def main() -> None:
    import torch

    parent, leave, ready = os.getppid(), int(sys.argv[1]), Path(sys.argv[2])
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # the context of this process takes memory too
    free, _total = torch.cuda.mem_get_info()
    held = torch.empty(bytes_to_take(free, leave), dtype=torch.uint8, device="cuda")
    written = ready.with_suffix(".writing")
    written.write_text(str(held.numel()))
    written.rename(ready)
    while os.getppid() == parent:
        time.sleep(0.5)  # no event to wait for: another program ends


if __name__ == "__main__":
    main()
