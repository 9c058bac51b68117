"""Partial keys: some columns of every key in another basis, 16 bits each, which InfiniGen keeps on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PartialKeys:
    """Encodes keys as the first columns of ``key @ basis``.

    A basis is orthogonal, so that ``q @ basis`` and ``k @ basis`` have the same product as q and k. The first columns
    of a basis carry most of the products: the sum over them alone is the speculated product. All query heads of a KV
    head share its basis.
    """

    def __init__(self, bases: Sequence[torch.Tensor], columns: int, dtype: torch.dtype) -> None:
        """``bases``: of each layer ``[KV heads, head_dim, head_dim]``, on the codes' device. ``dtype``: of codes."""
        assert dtype.itemsize == 2 and all(columns <= basis.shape[2] for basis in bases)
        self.columns = columns
        self._bases = [torch.empty(*basis.shape[:2], columns, device=basis.device) for basis in bases]
        self._dtype = dtype
        self.choose(bases)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def choose(self, bases: Sequence[torch.Tensor]) -> None:
        """Use other bases from now on. Codes of keys that were written before become invalid."""
        for own, basis in zip(self._bases, bases, strict=True):
            own.copy_(basis[:, :, : self.columns])  # in place: policies and engines hold these tensors

    def basis(self, layer: int) -> torch.Tensor:
        """Return the columns of the layer's basis that are kept: ``[KV heads, head_dim, columns]``, float32."""
        return self._bases[layer]

    def encode(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Encode keys as ``KeyEncoder.encode`` does: bytes ``[n, KV heads, T, 2 * columns]``."""
        partial = torch.einsum("nhtd,hdc->nhtc", keys.float(), self._bases[layer])
        return partial.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """View codes ``[..., 2 * columns]`` as partial keys ``[..., columns]`` of the codes' 16-bit dtype."""
        return codes.view(self._dtype)

    def queries(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Project queries ``[B, query heads, head_dim]`` to partial ones ``[B, KV heads, group, columns]``, float32."""
        basis = self._bases[layer]
        grouped = query.float().unflatten(1, (basis.shape[0], -1))
        return torch.einsum("bhgd,hdc->bhgc", grouped, basis)
