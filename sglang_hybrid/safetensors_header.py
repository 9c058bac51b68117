"""Reader for the metadata of a safetensors file, without torch, so that a launcher can refuse a bad file at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_LONGEST_HEADER = 100 << 20  # bytes, the limit of the format


def read_metadata(path: Path) -> Mapping[str, str]:
    """Return the metadata of a safetensors file, empty if it has none.

    Raise OSError if the file cannot be read, and ValueError if it has another format.
    """
    with path.open("rb") as file:
        # format: eight bytes with the length of a JSON object, the JSON object, the tensors
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}
