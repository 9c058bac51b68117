"""A tokenizer for models that have none, with one word for each token: SGLang's benchmark needs a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path


def tokenizer_of(model: Path, workspace: Path) -> Path:
    """Return a directory with a tokenizer: ``model``, or if it has none a new one with a word for each token."""
    if (model / "tokenizer_config.json").is_file():
        return model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    target = workspace / "tokenizer"
    # no special tokens: all ids are ordinary words, and answers are as long as they were asked to be
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(target)
    return target


def has_chat_template(tokenizer: Path) -> bool:
    said = tokenizer / "tokenizer_config.json"
    return (tokenizer / "chat_template.jinja").is_file() or (said.is_file() and "chat_template" in said.read_text())
