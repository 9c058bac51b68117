"""Removes from texts what must not leave the machine: keys, tokens, passwords, names of the user and of the host.

Secrets are found by the names in front of them, by their own patterns, and as values of environment variables with
such names. Redaction helps careful people and guarantees nothing: a password in a sentence looks like a word.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REMOVED = "[removed]"
_LEAST = 4  # minimum characters of a name or value that is replaced in all texts
_COMMON = {"root", "user", "users", "home", "admin", "test", "localhost"}  # names that identify nobody

# Name of a variable, flag or key whose value is a secret. Counts of tokens have other names, except SGLang's
# "#token: 812", which _ASSIGNED excludes.
_NAME = (
    r"[\w.-]*(?:api[_-]?key|secret|passw(?:or)?d|passphrase|credentials?|private[_-]?key|access[_-]?key)[\w-]*"
    r"|(?:[\w.-]*[_-])?token|authorization|(?:set-)?cookie"
)
_VALUE = r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)}\]]+"
_SAME = {"none", "null", "true", "false", '""', "''"}  # values that only say whether there is a secret: not replaced

_IS_NAME = re.compile(_NAME, re.IGNORECASE)
_SCHEME = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
# --api-key VALUE, --api-key=VALUE, and both as Python prints a list of arguments
_FLAG = re.compile(rf"(--(?:{_NAME})(?:['\"]\s*,\s*|=|\s+))({_VALUE})", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w#-])((?:{_NAME})['\"]?\s*[:=]\s*)({_VALUE})", re.IGNORECASE)
_FORMS = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE)
_IN_QUERY = re.compile(r"([?&](?:key|sig|signature|auth)=)[^&\s'\"]+", re.IGNORECASE)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_HOMES = re.compile(r"(/(?:home|Users)/)[\w.-]+")


@dataclass(frozen=True)
class Redactor:
    """Redacts texts. ``secrets``: values removed wherever they occur. ``names``: whole words and their replacements."""

    secrets: tuple[str, ...] = ()
    names: Mapping[str, str] | None = None

    @classmethod
    def of_this_machine(cls, environment: Mapping[str, str] | None = None) -> Redactor:
        environment = os.environ if environment is None else environment
        secrets = {value for name, value in environment.items() if _IS_NAME.fullmatch(name) and len(value) >= _LEAST}
        names = {_home(environment): "~", _user(environment): "USER", socket.gethostname(): "HOST"}
        known = {name: text for name, text in names.items() if len(name) >= _LEAST and name.lower() not in _COMMON}
        return cls(tuple(sorted(secrets, key=len, reverse=True)), known)

    def text(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, REMOVED)
        text = _PEM.sub(REMOVED, text)
        text = _SCHEME.sub(rf"\1 {REMOVED}", text)
        for pattern in (_FLAG, _ASSIGNED):
            text = pattern.sub(_without_value, text)
        text = _FORMS.sub(REMOVED, text)
        text = _IN_URL.sub(rf"\1{REMOVED}@", text)
        text = _IN_QUERY.sub(rf"\1{REMOVED}", text)
        text = _MAIL.sub("[e-mail]", text)
        for name, instead in sorted((self.names or {}).items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
        return _HOMES.sub(r"\1USER", text)

    def value(self, value: Any) -> Any:
        """Return a JSON value with all its texts redacted. The value of a key that names a secret is removed whole."""
        if isinstance(value, dict):
            return {
                self.text(str(key)): REMOVED if item and _IS_NAME.fullmatch(str(key)) else self.value(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value


def _without_value(found: re.Match[str]) -> str:
    before, value = found[1], found[2]
    if value.lower() in _SAME or REMOVED.startswith(value):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{before}{quote}{REMOVED}{quote}"


def _home(environment: Mapping[str, str]) -> str:
    home = environment.get("HOME", "").rstrip("/")
    return home if len(Path(home).parts) > 1 else ""


def _user(environment: Mapping[str, str]) -> str:
    try:
        return environment.get("USER") or environment.get("LOGNAME") or getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        return ""
