"""``sglang-hybrid report``: the papers' experiments at the size of this machine, on one page."""
