"""``sglang-hybrid profile``: finds the best settings of policy scout for one model and one budget."""
