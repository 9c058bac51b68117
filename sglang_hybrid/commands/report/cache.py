"""Results of experiments on disk, so that an interrupted report continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.report.session.messages import plain


def key_of(**parts: Any) -> str:
    """Return a fingerprint (16 hexadecimal digits) of ``parts``: everything that a result depends on."""
    return hashlib.sha256(json.dumps(plain(parts), sort_keys=True).encode()).hexdigest()[:16]


class Cache:
    """One JSON file per result. A damaged file, or a file with another key, counts as no result."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        """Use the files in ``folder``. With ``fresh``, ``get`` returns only results that this cache has written."""
        self._folder = folder
        self._fresh = fresh
        self._written: set[str] = set()

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        if self._fresh and name not in self._written:
            return None
        try:
            document = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) and document.get("key") == key else None

    def put(self, name: str, key: str, document: dict[str, Any]) -> None:
        """Write a result to a draft file, then rename the draft: a report may be killed at any time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(name)
        draft = path.with_suffix(".part")
        draft.write_text(
            json.dumps(plain({"key": key, **document}), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(draft, path)
        self._written.add(name)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
