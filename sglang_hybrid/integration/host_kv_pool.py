"""The host pool: SGLang's KV pool, with its buffers in shared host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_hybrid.config import HybridConfig, config_from_environment
from sglang_hybrid.engines.cuda.admission import PageAdmission
from sglang_hybrid.integration.gpu_node import gpu_node
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import code_bytes, is_compact
from sglang_hybrid.memory.digests import CompactDigests, Digests
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.pages import to_head_major, touched_pages
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.decoder import HostKernels
from sglang_hybrid.policies.registry import policy_named
from sglang_hybrid.protocol.cores import cpus_of_node, read_topology
from sglang_hybrid.protocol.region import SharedRegion

_PAGES_AT_A_TIME = 256  # pages of one layer that are permuted together after arrival: bounds temporary memory

LayerCopies = list[tuple[torch.Tensor, torch.Tensor]]  # K and V of some tokens, per layer


class HostKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """The KV cache of all requests, in host memory that other processes can map.

    Each layer has one K and one V buffer, page-major, and head-major inside a page, so that a block
    (one page, one KV head) is contiguous::

        k_buffer[layer]: [page][KV head][token of the page][head_dim]

    SGLang's token index is the host slot: slot // 32 is the page, slot % 32 the token.
    Page 0 takes the writes of padding tokens. ``device`` remains the model's device: new keys and
    values are on it, and so are digests, sketches and codes.
    """

    in_this_process: ClassVar[bool] = False  # whether this process has created a host pool
    model_dtype: ClassVar[torch.dtype | None] = None  # of queries, set before SGLang creates the pool
    region: SharedRegion
    digests: Digests | CompactDigests | None
    sketches: Sketches | None
    codes: KeyCodes | None
    admission: PageAdmission | None = None  # set by the CUDA engine of a decode instance
    kernels: HostKernels | None = None  # set by the native CPU engine; they digest pages

    def _create_buffers_normal(self) -> None:
        HostKVPool.in_this_process = True
        pages = (self.size + self.page_size) // self.page_size
        key_shape = (pages, self.head_num, self.page_size, self.head_dim)
        value_shape = (pages, self.head_num, self.page_size, self.v_head_dim)
        itemsize = self.dtype.itemsize
        sizes = [torch.Size(shape).numel() * itemsize for shape in (key_shape, value_shape)]

        near = cpus_of_node(read_topology(), gpu_node(self.device))
        self.region = SharedRegion(SharedRegion.size_for(*sizes * self.layer_num), name="sglang-hybrid-kv", cpus=near)
        self.k_buffer = [self.region.take(key_shape, self.dtype) for _ in range(self.layer_num)]
        self.v_buffer = [self.region.take(value_shape, self.dtype) for _ in range(self.layer_num)]
        config = config_from_environment()
        self.digests = self.sketches = None
        if policy_named(config.policy).needs.digests:
            self._create_digests(config, pages)
        kv_shape = KVShape(self.layer_num, self.head_num, self.head_dim, self.v_head_dim, itemsize)
        of_key = code_bytes(config, kv_shape)
        codes = (of_key, self.layer_num, pages, self.head_num, self.page_size, self.device)
        self.codes = KeyCodes(*codes) if of_key else None

    def _create_digests(self, config: HybridConfig, pages: int) -> None:
        channels = min(config.sketch_channels, self.head_dim)
        if channels:
            shape = (self.layer_num, pages, self.head_num, self.page_size)
            self.sketches = Sketches(channels, *shape, self.device)
        shape = (self.layer_num, pages, self.head_num, self.head_dim)
        if self.sketches and is_compact(config.digest_dtype, channels, self.head_dim, str(self.device)):
            if self.head_dim % 32:
                raise Refusal(f"digest_dtype=int8 needs a head_dim that is a multiple of 32, not {self.head_dim}")
            self.digests = CompactDigests(self.sketches, *shape, self.device)
        else:
            self.digests = Digests(*shape, self._digest_dtype(), self.device)

    def _digest_dtype(self) -> torch.dtype:
        """Return the dtype of digests: that of keys, but the model's for FP8 on a GPU.

        The extremes of FP8 keys are exact in the model's dtype, and CUDA kernels multiply them by queries directly.
        """
        on_gpu = torch.device(self.device).type == "cuda"
        return self.model_dtype or self.dtype if on_gpu and self.dtype == reference.FP8 else self.dtype

    def _kv_tokens_per_row(self) -> int:
        """Return the tokens per row of a buffer: a page. SGLang before 0.5.22 derives this number from shapes."""
        return int(self.page_size)

    def admit(self, pages: torch.Tensor, last_filled: int) -> None:
        """Convert pages that a prefill instance wrote to this pool's layout, and write digests, sketches and codes.

        Must be called exactly once for every page that arrives. All pages are full except the last, which has
        ``last_filled`` valid tokens.
        """
        filled = torch.full_like(pages, self.page_size)
        filled[-1:] = last_filled
        if self.admission is not None:
            self.admission.admit(pages, filled)
            return
        for layer, (keys, values) in enumerate(zip(self.k_buffer, self.v_buffer, strict=True)):
            for some, full in zip(pages.split(_PAGES_AT_A_TIME), filled.split(_PAGES_AT_A_TIME), strict=True):
                to_head_major(keys, some)
                to_head_major(values, some)
                self._summarise(layer, some, full)
                if self.codes:
                    self.codes.refresh(layer, keys, some)

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values of new tokens to ``slots`` ``[T]``, and refresh the digests of their pages."""
        self._store_kv_layer(layer, slots, keys, values)

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Write keys, values and codes of new tokens, and refresh the digests and sketches of their pages."""
        slots = loc.to("cpu", torch.int64)
        pages, offsets = slots // self.page_size, slots % self.page_size
        keys, values = self.k_buffer[layer_idx], self.v_buffer[layer_idx]
        if self.dtype != self.store_dtype == cache_k.dtype:  # SGLang passes FP8 as bytes
            cache_k, cache_v = cache_k.view(self.dtype), cache_v.view(self.dtype)
        cache_k, cache_v = (reference.to_stored(part, self.dtype) for part in (cache_k, cache_v))
        keys[pages, :, offsets] = cache_k.to("cpu")
        values[pages, :, offsets] = cache_v.to("cpu")
        if self.codes:
            self.codes.write(layer_idx, pages, offsets, cache_k)
        self._summarise(layer_idx, *touched_pages(slots, self.page_size))

    def _summarise(self, layer: int, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Write digests and sketches of ``pages`` ``[n]``, whose first ``filled`` ``[n]`` keys are valid."""
        if self.digests is None:
            return
        if self.kernels is not None:
            self.kernels.summarise(layer, pages, filled)
            return
        keys = self.k_buffer[layer]
        self.digests.refresh(layer, keys, pages, filled)
        if self.sketches:
            self.sketches.refresh(layer, keys, self.digests.of_layer(layer), pages)

    # When SGLang retracts a request on a disaggregated decode instance, it copies the request's KV cache out of
    # the pool, and back to other slots later.

    def get_cpu_copy(
        self, indices: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.wait_for_device()
        slots = indices.to("cpu", torch.int64)
        pages, offsets = slots // self.page_size, slots % self.page_size
        return [
            (keys[pages, :, offsets], values[pages, :, offsets])
            for keys, values in zip(self.k_buffer, self.v_buffer, strict=True)
        ]

    def load_cpu_copy(self, kv_cache_cpu: LayerCopies, indices: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        self.wait_for_device()
        for layer, (keys, values) in enumerate(kv_cache_cpu):
            self._store_kv_layer(layer, indices, keys, values)
        self.wait_for_device()  # until digests are written, which steps on another stream read

    def wait_for_device(self) -> None:
        """Wait for all work of the GPU: steps in flight write new tokens to the pool. Does nothing on a CPU."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
