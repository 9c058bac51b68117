"""Measures what decode steps lose by attending to a part of the blocks: KL to full attention, in plain torch."""
