"""The tokenizer of a model directory, without transformers, which would import torch and take seconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.eval.errors import InputError

_CONTENT = "\ue000"  # a private-use character: no chat template contains it
_PROBE = "The quick brown fox: 3.14, naïve café, 北京 and\n\n  def f(x): return x"
# Some templates print the date. A fixed date keeps prompts the same every day.
_TODAY = datetime(2025, 1, 1)


@dataclass(frozen=True)
class ChatTemplate:
    """The text that a chat puts before and after the user's words, up to the beginning of the answer."""

    before: str = ""
    after: str = ""


class ModelTokenizer:
    def __init__(self, directory: Path) -> None:
        """Load ``tokenizer.json`` of ``directory``. Raise InputError if there is no such file."""
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{directory} has no tokenizer.json: name the model's directory with --model-path")
        self.directory = directory
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The model's chat template, None if it has none. Raise InputError for a template that cannot be used."""
        config = _read_json(self.directory / "tokenizer_config.json")
        template = _template(self.directory, config)
        if template is None:
            return None
        tokens = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        before, mark, after = _render(template, tokens).partition(_CONTENT)
        if not mark:
            raise InputError(f"the chat template of {self.directory} leaves out what the user says: correct it")
        return ChatTemplate(before, after)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that make the same prompts."""
        chat = self.chat or ChatTemplate()
        vocabulary = sorted(self._tokenizer.get_vocab(with_added_tokens=True).items())
        facts = [vocabulary, self.encode(_PROBE, add_special_tokens=True), chat.before, chat.after]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return found


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template from the files where Hugging Face puts it, newest kind first; None if there is none."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = next((one["template"] for one in found if one.get("name") == "default"), None)
    return found


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _render(template: str, tokens: dict[str, str]) -> str:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # the options that transformers sets
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=refuse, strftime_now=_TODAY.strftime)
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": _CONTENT}], add_generation_prompt=True, enable_thinking=False,
            tools=None, documents=None, **tokens,
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError) as error:
        raise InputError(f"the model's chat template cannot be used: {' '.join(str(error).split())}") from error
