"""``sglang-hybrid size``: how many requests fit on a machine, and how fast they decode."""
