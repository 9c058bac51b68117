"""The parts of a server's /server_info that ``top`` shows: model, settings, facts, and some arguments of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_hybrid.integration import BACKEND_NAME

# No other arguments of SGLang are shown, because API keys are among them.
_SHOWN = (
    "attention_backend", "context_length", "device", "dp_size", "dtype", "kv_cache_dtype", "max_running_requests",
    "page_size", "pp_size", "tp_size",
)  # fmt: skip
_BACKENDS = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
_OURS = "sglang_hybrid"


def model_of(info: Mapping[str, Any]) -> str | None:
    name = info.get("served_model_name") or info.get("model_path")
    # a full path would push everything else out of the line
    return str(name).rstrip("/").rsplit("/", 1)[-1] if name else None


def is_hybrid(info: Mapping[str, Any]) -> bool:
    return bool(_told(info)) or any(info.get(key) == BACKEND_NAME for key in _BACKENDS)


def backend_of(info: Mapping[str, Any]) -> str:
    return str(info.get("attention_backend") or "unknown")


def settings_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Return this package's settings as the server uses them; a key in a section is ``section.key``."""
    return dict(_flat(_told(info).get("settings"), ""))


def facts_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Return facts that follow from the settings, such as the worker's threads and the tokens of the host pool.

    Facts outside of sections are left out: the metric ``sglang_hybrid_info`` has them as labels.
    """
    sections = {key: value for key, value in _told(info).items() if key != "settings" and isinstance(value, Mapping)}
    return {name: text for name, text in _flat(sections, "") if text}


def arguments_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of SGLang that explain what the view shows, without arguments that are None."""
    return {key: _text(info[key]) for key in _SHOWN if info.get(key) is not None}


def _told(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the report of this package's backend: at the top level, or in the first replica's state that has one."""
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
