"""Writes a safetensors file while its values are computed, so that only a piece of the values is in memory.

8 bytes     length of the header, little-endian
header      JSON: for each tensor its dtype, shape and place among the values; padded with spaces to 8 bytes
values      of one tensor after the other, in the header's order, without gaps
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


def bytes_per_weight(dtype: str) -> int:
    return _DTYPES[dtype][1]


def write_safetensors(
    path: Path, dtype: str, shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[npt.NDArray[Any]]
) -> None:
    """Write the file. ``pieces``: values of all tensors in the order of ``shapes``, in ``dtype``, cut anywhere."""
    code, itemsize = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on the format
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + itemsize * math.prod(shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file, and values must be aligned
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for piece in pieces:
            written += file.write(piece.data.cast("B"))
    if written != end:
        raise ValueError(f"{path} got {written} bytes of values, its header promises {end}")
