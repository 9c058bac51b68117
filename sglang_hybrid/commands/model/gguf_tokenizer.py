"""Writes the byte-level BPE tokenizer of a GGUF as the two tokenizer files of a Hugging Face directory."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.gguf_metadata import GgufMetadata

# Values of tokenizer.ggml.token_type
CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4
UNUSED_TOKEN = 5  # fills the vocabulary up to the size of the embedding table


def write_tokenizer(fields: GgufMetadata, context_length: int, out: Path) -> None:
    tokenizer = _rebuild(fields)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(fields, context_length), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def check_tokenizer_is_supported(fields: GgufMetadata) -> None:
    """Raise DefaultModelError if the rebuilt tokenizer would split text differently from the model's own one."""
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise DefaultModelError(
            f"{fields.path} has a {model!r} tokenizer; this converter rebuilds only byte-level BPE ('gpt2')."
        )
    split = fields.text("tokenizer.ggml.pre")
    if split not in _TEXT_SPLITS:
        known = ", ".join(sorted(_TEXT_SPLITS))
        raise DefaultModelError(f"{fields.path} splits text the {split!r} way; this converter knows: {known}.")
    if fields.get("tokenizer.ggml.add_bos_token"):
        raise DefaultModelError(f"{fields.path} puts a BOS token before every text, which this converter does not do.")


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_one_by_one() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # endings of English words
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the space or sign before it
    r"|\p{N}"  # one digit
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs, with the ends of lines behind them
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space; the last of it goes with the word behind it
)


def _qwen2_words() -> Any:
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class _TextSplit:
    """How text is normalised, and then cut into pieces for BPE."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None


# by tokenizer.ggml.pre
_TEXT_SPLITS = {
    "gpt-2": _TextSplit(_byte_level),
    "smollm": _TextSplit(_digits_one_by_one),
    "qwen2": _TextSplit(_qwen2_words, normalizers.NFC),
}


def _rebuild(fields: GgufMetadata) -> Any:
    tokens = fields.require("tokenizer.ggml.tokens")
    kinds = fields.require("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.require("tokenizer.ggml.merges")]

    by_kind = list(zip(tokens, kinds, strict=True))
    vocabulary = {token: index for index, (token, kind) in enumerate(by_kind) if kind != UNUSED_TOKEN}
    split = _TEXT_SPLITS[fields.text("tokenizer.ggml.pre")]

    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    # Both kinds are matched whole in the input. Only control tokens disappear when text is decoded for people.
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in by_kind if k == CONTROL_TOKEN]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in by_kind if k == USER_DEFINED_TOKEN])
    return tokenizer


def _tokenizer_config(fields: GgufMetadata, context_length: int) -> dict[str, Any]:
    tokens = fields.require("tokenizer.ggml.tokens")
    eos_id = fields.integer("tokenizer.ggml.eos_token_id")
    ids = {
        "bos_token": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token": eos_id,
        "pad_token": fields.get("tokenizer.ggml.padding_token_id", eos_id),
        "unk_token": fields.get("tokenizer.ggml.unknown_token_id"),
    }
    config: dict[str, Any] = {
        # Not GPT2Tokenizer: in transformers 5 that class replaces the pre-tokenizer of tokenizer.json with its own,
        # which does not cut digits apart.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    config |= {name: tokens[index] for name, index in ids.items() if index is not None}
    if (template := fields.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
