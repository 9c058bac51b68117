"""Short windows with tokens that no text has: those that tokenizers put at the start of prompts and between turns.

A predictor is not fitted on them, because they are rare. But every prompt may begin with one, its keys may be the
largest of a layer, and all later tokens attend to them. So ranges of channels are measured on them too.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.policies.scout.calibration_text import Window

_SENTENCE = "The ferry to the island leaves at nine, unless the wind turns."
_CHAT = (
    {"role": "user", "content": _SENTENCE},
    {"role": "assistant", "content": "Then we should pack tonight."},
    {"role": "user", "content": "And call the harbour first."},
)


def special_windows(tokenizer: Any, longest: int) -> tuple[Window, ...]:
    """Return windows of at most ``longest`` tokens, each with another first token where a tokenizer has several.

    ``tokenizer``: of Hugging Face, or with a part of its methods; what is missing is left out.
    """
    words = [*tokenizer.encode(_SENTENCE, add_special_tokens=False)]
    special = [*getattr(tokenizer, "all_special_ids", ())]
    between = [token for one in special for token in (one, *words[:2])]
    windows = ([*tokenizer.encode(_SENTENCE, add_special_tokens=True)], _chat(tokenizer), between)
    return tuple(tuple(window[:longest]) for window in windows if window)


def _chat(tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return []
    try:
        text = tokenizer.apply_chat_template(list(_CHAT), tokenize=False, add_generation_prompt=True)
        return [*tokenizer.encode(text, add_special_tokens=False)]
    except Exception:  # a model's template is a program of its author's: it may want other roles or arguments
        return []
