"""What a server says about itself in /server_info, as far as it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_hybrid.integration import BACKEND_NAME

# Nothing else of SGLang's arguments is shown: keys are among them.
_SHOWN = (
    "attention_backend", "context_length", "device", "dp_size", "dtype", "kv_cache_dtype", "max_running_requests",
    "page_size", "pp_size", "tp_size",
)  # fmt: skip
_BACKENDS = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
_OURS = "sglang_hybrid"


def model_of(info: Mapping[str, Any]) -> str | None:
    name = info.get("served_model_name") or info.get("model_path")
    # a path would push everything else out of its line
    return str(name).rstrip("/").rsplit("/", 1)[-1] if name else None


def is_hybrid(info: Mapping[str, Any]) -> bool:
    return bool(_told(info)) or any(info.get(key) == BACKEND_NAME for key in _BACKENDS)


def backend_of(info: Mapping[str, Any]) -> str:
    return str(info.get("attention_backend") or "unknown")


def settings_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Our settings as the server uses them, with dots between the names of sections and keys."""
    return dict(_flat(_told(info).get("settings"), ""))


def facts_of(info: Mapping[str, Any]) -> dict[str, str]:
    """What followed from the settings, such as the worker's threads and the tokens of the host pool.

    What stands there without a section is in the labels of the metric ``sglang_hybrid_info`` too.
    """
    sections = {key: value for key, value in _told(info).items() if key != "settings" and isinstance(value, Mapping)}
    return {name: text for name, text in _flat(sections, "") if text}


def arguments_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Those of SGLang's arguments that explain what is seen, where they have a value."""
    return {key: _text(info[key]) for key in _SHOWN if info.get(key) is not None}


def _told(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What our backend says about itself: once, or in the state of each replica, of which the first is taken."""
    states = info.get("internal_states")
    replicas = [state for state in states if isinstance(state, Mapping)] if isinstance(states, list) else []
    told = next((place[_OURS] for place in (info, *replicas) if _OURS in place), None)
    return told if isinstance(told, Mapping) else {}


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [
            pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}" if name else str(key))
        ]  # fmt: skip
    return [(name, _text(value))] if name else []


def _text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case list() | tuple():
            return ", ".join(_text(each) for each in value)
        case _:
            return str(value)
