"""What SGLANG_HYBRID_CHAOS can switch on in a server."""

SAME_BITS = "same-bits"  # see same_bits.py
SPOIL_FREED_PAGES = "spoil-freed-pages"  # see integration/freed_pages.py
ROWS_NOT_RESET = "bug-rows-not-reset"  # on purpose, see inside.py
