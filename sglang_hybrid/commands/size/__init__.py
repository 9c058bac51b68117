"""``sglang-hybrid size``: how many requests fit on a machine, and how fast they decode. Needs neither torch nor SGLang."""
