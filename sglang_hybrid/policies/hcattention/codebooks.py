"""Codebooks of a model's keys: the file, and one rank's part of it on the model's device.

A codebook file has the safetensors format, so it contains nothing that can run: the centroids of each layer are one
tensor, everything else is JSON in the file's metadata.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_hybrid.ops import reference_weights
from sglang_hybrid.policies.hcattention.codebook_facts import METADATA_KEY, CodebookError, CodebookFacts, facts_of

_AT_A_TIME = 8 << 20  # distances to centroids that are in memory at once while keys are encoded


class Codebooks:
    """The codebooks of a whole model."""

    def __init__(self, facts: CodebookFacts, layers: Sequence[torch.Tensor]) -> None:
        """``layers``: ``[KV heads, groups, centroids, channels of a group]`` each; 1 group where groups share."""
        self.facts = facts
        self.layers = layers

    def save(self, path: Path) -> None:
        """Write the file atomically: an interrupted write leaves the previous file as it was."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        tensors = {_name(layer): table.to(torch.float16).contiguous() for layer, table in enumerate(self.layers)}
        save_file(tensors, part, metadata={METADATA_KEY: msgspec.json.encode(self.facts).decode()})
        os.replace(part, path)

    def part(self, kv_heads: slice, device: torch.device | str) -> QuantisedKeys:
        """Return the encoder of a rank with these KV heads, with float32 centroids on ``device``."""
        tables = [table[kv_heads].to(device, torch.float32) for table in self.layers]
        return QuantisedKeys(tables, self.facts.groups, self.facts.index_bytes)


class QuantisedKeys:
    """Encodes keys as indices of their nearest centroids; implements ``memory.key_codes.KeyEncoder``.

    Layout of a code: one index for each group, one byte each up to 256 centroids, two bytes (little endian) above.
    """

    def __init__(self, tables: Sequence[torch.Tensor], groups: int, index_bytes: int) -> None:
        """``tables``: of each layer, ``[KV heads, groups or 1, centroids, channels of a group]``, float32."""
        self._tables = tables
        self.groups, self.index_bytes = groups, index_bytes
        self._index = torch.uint8 if index_bytes == 1 else torch.int16
        self.file = ""  # from which the codebooks were read

    @property
    def device_bytes(self) -> int:
        """Return the device memory of the codebooks themselves."""
        return sum(table.nbytes for table in self._tables)

    def encode(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        tables = self.tables(layer)
        heads, groups, centroids, _ = tables.shape
        most = max(1, _AT_A_TIME // (heads * keys.shape[2] * groups * centroids))
        found = [reference_weights.nearest_centroids(some, tables).to(self._index) for some in keys.split(most)]
        return torch.cat(found).view(torch.uint8)

    def indices(self, codes: torch.Tensor) -> torch.Tensor:
        """View codes ``[..., code_bytes]`` as integer indices ``[..., groups]``."""
        return codes.view(self._index)

    def tables(self, layer: int) -> torch.Tensor:
        """Return a layer's centroids by group: ``[KV heads, groups, centroids, channels of a group]``, float32."""
        return self._tables[layer].expand(-1, self.groups, -1, -1)

    def codebooks(self, layer: int) -> torch.Tensor:
        """Return the centroids as stored: ``[KV heads, groups or 1, centroids, channels of a group]``, float32."""
        return self._tables[layer]


def load_codebooks(path: Path) -> Codebooks:
    """Read a codebook file. Raise CodebookError if the file is missing or damaged."""
    if not path.is_file():
        raise CodebookError("there is no such file; sglang-hybrid profile --codebook makes one")
    try:
        with safe_open(path, framework="pt") as file:
            facts = facts_of(file.metadata())
            layers = [file.get_tensor(_name(layer)) for layer in range(facts.model.layers)]
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise CodebookError(f"cannot be read: {error}") from error
    shape = (facts.model.kv_heads, 1 if facts.shared else facts.groups, facts.centroids, facts.part)
    for layer, table in enumerate(layers):
        if table.shape != shape or not table.isfinite().all():
            raise CodebookError(f"damaged: layer {layer} has {tuple(table.shape)} numbers, not {shape} finite ones")
    return Codebooks(facts, layers)


def _name(layer: int) -> str:
    return f"centroids.{layer}"
