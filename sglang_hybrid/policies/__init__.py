"""Decode policies: where a block lives, what is selected, who computes it."""
