"""Decode policies: where a block is kept, which blocks are selected, and who computes them."""
