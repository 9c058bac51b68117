"""Admission of pages that a peer wrote in SGLang's layout: they get the pool's layout, and digests."""

from __future__ import annotations

import contextlib

import pytest
import torch
from cuda_cases import DEVICE
from prefill_cases import Shape

from sglang_hybrid.engines.cuda import admission
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests, digest_pages
from sglang_hybrid.ops.reference import FP8
from sglang_hybrid.protocol.region import SharedRegion

TOKENS = 32


class NoStream:
    def __init__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
def test_admitted_pages_have_the_pools_layout_and_digests(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dtype = torch.bfloat16 if dtype == FP8 else dtype
    if DEVICE == "cpu":
        for name in ("stream", "device"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(admission, "_PAGES_AT_A_TIME", 4)
    of, random = Shape(heads=3, dtype=dtype), torch.Generator().manual_seed(1)
    page = (of.heads, TOKENS, of.dim)
    size = of.pages * of.heads * TOKENS * of.dim * dtype.itemsize
    region = SharedRegion(SharedRegion.size_for(*[size] * 2 * of.layers))
    registered = host_memory.RegisteredRegion(region)
    channels = torch.arange(of.channels, device=DEVICE).expand(of.heads, -1).contiguous()
    layers, originals = [], []
    pages, filled = torch.tensor([7, 3, 20, 21, 5, 30, 1]), torch.tensor([32] * 6 + [9])
    for _ in range(of.layers):
        keys, values = (region.take((of.pages, *page), dtype) for _ in range(2))
        original = [torch.randn(of.pages, *page, generator=random).to(dtype) for _ in range(2)]
        for part, true in zip((keys, values), original, strict=True):
            part.copy_(true)
            # SGLang's layout, in which a peer writes pages: token by token
            part.view(of.pages, -1)[pages] = true[pages].transpose(1, 2).reshape(len(pages), -1)
        digests = LayerDigests(
            torch.zeros(of.pages, of.heads, 2, of.dim, dtype=model_dtype, device=DEVICE),
            torch.zeros(of.pages, of.heads, TOKENS, of.channels // 2, dtype=torch.uint8, device=DEVICE),
            channels,
            pool=dtype,
        )
        layers.append(DeviceLayer(HostPool(registered, keys, values), digests))
        originals.append(original)
    admission.PageAdmission(layers, of.heads, of.dim, dtype, DEVICE).admit(pages, filled)
    for layer, (keys, values) in zip(layers, originals, strict=True):
        assert torch.equal(layer.pool.keys.view(torch.uint8), keys.view(torch.uint8))
        assert torch.equal(layer.pool.values.view(torch.uint8), values.view(torch.uint8))
        assert layer.digests.codes is not None
        codes = torch.zeros_like(layer.digests.codes)
        expected = LayerDigests(torch.zeros_like(layer.digests.digests), codes, channels, pool=dtype)
        digest_pages(expected, keys[pages].to(DEVICE), pages.int().to(DEVICE), filled.int().to(DEVICE))
        torch.cuda.synchronize()
        assert torch.equal(layer.digests.digests, expected.digests)
        assert torch.equal(layer.digests.codes, codes)
