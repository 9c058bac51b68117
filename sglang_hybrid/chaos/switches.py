"""What SGLANG_HYBRID_CHAOS can switch on in a server."""

import signal

SAME_BITS = "same-bits"  # see same_bits.py
SPOIL_FREED_PAGES = "spoil-freed-pages"  # see integration/freed_pages.py
TELL_STACKS = signal.SIGUSR2  # makes the scheduler's process write the stacks of its threads into its log
ROWS_NOT_RESET = "bug-rows-not-reset"  # on purpose, see inside.py
