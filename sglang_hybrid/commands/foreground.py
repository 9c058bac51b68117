"""Makes Ctrl-C work for a launcher that make started.

The terminal sends Ctrl-C to make as well, and make then fails whatever its recipe returns. A launcher that make started
therefore makes a process group of its own the terminal's foreground group, as a shell does with its jobs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def own_foreground_group() -> Iterator[None]:
    """Run the body in the terminal's foreground group. Do nothing without make, a terminal, or in the background."""
    terminal = _terminal_of_make()
    if terminal is None:
        yield
        return
    before = os.getpgrp()
    try:
        os.setpgid(0, 0)
        _give_terminal(terminal, os.getpgrp())
        # Ctrl-Z would stop this process alone, and make would wait for ever
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        yield
    finally:
        with contextlib.suppress(OSError):
            _give_terminal(terminal, before)
            os.setpgid(0, before)
        os.close(terminal)


def _terminal_of_make() -> int | None:
    if "MAKELEVEL" not in os.environ:
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(terminal) == os.getpgrp() and os.getpgrp() != os.getpid():
            return terminal
    os.close(terminal)
    return None


def _give_terminal(terminal: int, group: int) -> None:
    # A process in the background may call tcsetpgrp only while it ignores SIGTTOU.
    handled = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, handled)
