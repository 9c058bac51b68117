"""Who computes attention over the misses, and what happens when he cannot."""
