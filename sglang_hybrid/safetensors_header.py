"""The metadata of a safetensors file, read without torch: a launcher refuses a wrong file at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_LONGEST_HEADER = 100 << 20  # bytes, the format's own limit


def read_metadata(path: Path) -> Mapping[str, str]:
    """Raises OSError, or ValueError for a file of another format."""
    with path.open("rb") as file:
        # the format: eight bytes with the length of a JSON object, then that object, then the tensors
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}
