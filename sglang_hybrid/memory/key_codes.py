"""A code for every key, on the model's device, for policies that look at single tokens."""

from __future__ import annotations

from typing import Protocol

import torch


class KeyEncoder(Protocol):
    """Encodes keys in the format of one policy."""

    def encode(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Encode keys ``[n, KV heads, T, head_dim]`` as uint8 ``[n, KV heads, T, code_bytes]``, on the keys' device.

        Slots without a token may hold anything, also NaN: their codes are never read.
        """


class KeyCodes:
    """Codes of all keys in the pool. Code that writes keys has to update them, as it does digests.

    Layout, one tensor a layer::

        [page][KV head][token of the page][code_bytes]
    """

    def __init__(self, code_bytes: int, layers: int, pages: int, heads: int, page_tokens: int, device: str) -> None:
        shape = (pages, heads, page_tokens, code_bytes)
        self.code_bytes = code_bytes
        self.encoder: KeyEncoder | None = None  # None until a policy sets one
        self._layers = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layers)]

    def use(self, encoder: KeyEncoder) -> None:
        """Encode keys by ``encoder`` from now on. Codes of keys that were written before become invalid."""
        self.encoder = encoder

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    def of_layer(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def write(self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor) -> None:
        """Encode new keys ``[n, KV heads, head_dim]`` (pool's dtype): key i is token ``offsets[i]`` of ``pages[i]``.

        Keys that are on the device already need not be read back from the pool, nor do the other keys of their pages.
        """
        if self.encoder is None:
            return  # before the policy is created: no request is running
        codes = self._layers[layer]
        encoded = self.encoder.encode(layer, keys.to(codes.device).unsqueeze(2)).squeeze(2)
        codes[pages.to(codes.device), :, offsets.to(codes.device)] = encoded

    def refresh(self, layer: int, keys: torch.Tensor, pages: torch.Tensor) -> None:
        """Encode all keys of ``pages`` of the pool ``keys``, which another process wrote."""
        if self.encoder is None:
            return
        codes = self._layers[layer]
        blocks, pages = keys[pages.to(keys.device)].to(codes.device), pages.to(codes.device)
        codes[pages] = self.encoder.encode(layer, blocks)
