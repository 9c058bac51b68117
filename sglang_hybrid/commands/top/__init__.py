"""``sglang-hybrid top``: watch a running server, in the terminal or in a browser."""
