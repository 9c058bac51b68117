"""``sglang-hybrid profile``: finds out, for one model and budget, what the settings of policy scout should be."""
