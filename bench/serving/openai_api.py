"""Checks a server's OpenAI API: the model's name, a completion in one piece, the same one streamed, and a chat."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

TOKENS = 16


def ask_everything(url: str, prompt: str, *, chats: bool, seconds: float) -> dict[str, Any]:
    """Return the answers, and ``passed``. ``chats``: whether the model's tokenizer has a chat template."""
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=seconds) as reply:
        model = json.loads(reply.read())["data"][0]["id"]
    asked["model"] = model
    whole = json.loads(_post(f"{url}/v1/completions", asked, seconds))
    streamed = text_of_stream(_post(f"{url}/v1/completions", asked | {"stream": True}, seconds))
    told = {
        "text": whole["choices"][0]["text"],
        "usage": {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
        "streamed_is_equal": streamed == whole["choices"][0]["text"],
    }
    good = bool(told["text"]) and told["streamed_is_equal"] and told["usage"]["completion_tokens"] == TOKENS
    if chats:
        message = {"role": "user", "content": "Say hello."}
        body = {"model": model, "messages": [message], "max_tokens": TOKENS, "temperature": 0}
        answer = json.loads(_post(f"{url}/v1/chat/completions", body, seconds))["choices"][0]["message"]["content"]
        told["chat"], good = answer, good and bool(answer)
    return {"passed": good, **told}


def text_of_stream(body: str) -> str:
    """Return the text of all server-sent events in ``body``, joined."""
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def _post(url: str, body: Mapping[str, Any], seconds: float) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as reply:
        return str(reply.read().decode())
