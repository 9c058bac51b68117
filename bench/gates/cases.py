"""Prompts that all backends get: prompts that decode together in one batch, and some of them alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

# tokens: less than a page, at a page's edges, only a tail beyond full pages, many pages, longer than a prefill chunk
LENGTHS = (10, 31, 32, 33, 64, 97, 150, 333, 700, 1500, 3000, 6000)
ALONE = (33, 700, 6000)

Cases = dict[str, list[list[int]]]


def cases(model: Path, lengths: Sequence[int], alone: Sequence[int]) -> Cases:
    ids, start, prompts = token_ids(model, sum(lengths)), 0, []
    for length in lengths:
        prompts.append(ids[start : start + length])
        start += length
    of_length = dict(zip(lengths, prompts, strict=True))
    return {"together": prompts} | {f"alone-{length}": [of_length[length]] for length in alone}


def token_ids(model: Path, count: int) -> list[int]:
    """Return ``count`` token ids: English text if the model has a tokenizer, otherwise random.

    Raises ValueError if the text has fewer tokens.
    """
    if not (model / "tokenizer_config.json").is_file():
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        return random.Random(0).choices(range(vocabulary), k=count)
    from pydoc_data.topics import topics  # English text that every CPython includes

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    text = "\n\n".join(topics[key] for key in sorted(topics))
    ids: list[int] = tokenizer(text[: 12 * count])["input_ids"]
    if len(ids) < count:
        raise ValueError(f"there is text for {len(ids)} tokens only, not for {count}")
    return ids[:count]
