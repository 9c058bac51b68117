"""A tokenizer for models that have none: every token is a word of its own. SGLang's benchmark does not run without."""

from __future__ import annotations

import json
from pathlib import Path


def tokenizer_of(model: Path, workspace: Path) -> Path:
    """The model's own directory, or one with a tokenizer of as many words as the model has tokens."""
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
