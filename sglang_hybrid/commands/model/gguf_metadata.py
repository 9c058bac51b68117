"""Typed access to the key/value part of a GGUF, with errors that name the file and the key."""

from pathlib import Path
from typing import Any

from sglang_hybrid.commands.model.errors import DefaultModelError


class GgufMetadata:
    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise DefaultModelError(f"{self.path} has no field {key!r}, which the conversion needs.")
        return value

    def text(self, key: str) -> str:
        return str(self.require(key))

    def integer(self, key: str) -> int:
        return int(self.require(key))
