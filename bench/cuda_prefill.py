"""Measure a layer's prefill with the pool in host memory, against FlashInfer with pages in device memory.

    python -m bench.cuda_prefill [--out FILE] [--layers 8] [--repeats 7]

Shapes are those of a Qwen3-14B layer: 40 query heads, 8 KV heads, head_dim 128, bfloat16. One row has 8192 new tokens
behind a prefix of 0, 8k or 24k tokens, like the chunks of a 32k prompt. A pass over several layers is timed from its
first layer, whose prefix is loaded by then, until the next work on the main stream could start. Rows "in a model" also
run the layer's matrix products before and after each attention, on both sides, so that copies compete with the same
work as in a server.

    flashinfer           copies the new tokens to their pages and attends; all pages are in device memory
    engine, kernels      the pool is in host memory; the copy engine or kernels copy the pages
    neighbours, random   the pages of the row lie side by side in the pool, or anywhere
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from bench.record import write_result
from sglang_hybrid.engines.cuda import staging
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.prefill import DevicePrefill, PrefillRows
from sglang_hybrid.ops.cuda.copies import place_tokens
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.protocol.region import SharedRegion

QUERY_HEADS, HEADS, DIM, TOKENS, CHANNELS = 40, 8, 128, 32, 32
HIDDEN, INTERMEDIATE = 5120, 17408
CHUNK, PREFIXES = 8192, (0, 8192, 24576)
SCALE = DIM**-0.5
DTYPE = torch.bfloat16
POOL_PAGES = 2048
ENGINE_RUN_BYTES = {"engine": 0, "kernels": 1 << 60}

Row = dict[str, Any]


@dataclass(frozen=True)
class Pass:
    """One prefill pass: call ``begin`` once, then ``attend`` for every layer, then ``finish``."""

    begin: Callable[[], None]
    attend: Callable[[int], object]
    finish: Callable[[], None] = lambda: None


class Products:
    """Matrix products of a decoder layer. All layers share one set of weights."""

    def __init__(self) -> None:
        def weight(inputs: int, outputs: int) -> torch.Tensor:
            return torch.randn(inputs, outputs, dtype=DTYPE, device="cuda") / math.sqrt(inputs)

        self.qkv, self.out = weight(HIDDEN, (QUERY_HEADS + 2 * HEADS) * DIM), weight(QUERY_HEADS * DIM, HIDDEN)
        self.up, self.down = weight(HIDDEN, 2 * INTERMEDIATE), weight(INTERMEDIATE, HIDDEN)
        self.hidden = torch.randn(CHUNK, HIDDEN, dtype=DTYPE, device="cuda")

    def before(self) -> None:
        self.hidden @ self.qkv

    def after(self) -> None:
        self.hidden @ self.out
        gate, up = (self.hidden @ self.up).chunk(2, dim=1)
        (torch.nn.functional.silu(gate) * up) @ self.down


def timed(one: Pass, layers: int, repeats: int, products: Products | None) -> tuple[float, float, float]:
    """Return median seconds: of a layer on the device, of a layer's launches on the host, of ``begin`` on the host."""
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        one.begin()
        planned = time.perf_counter()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launching = time.perf_counter()
        for layer in range(layers):
            if products:
                products.before()
            one.attend(layer)
            if products:
                products.after()
        launched = time.perf_counter()
        one.finish()
        end.record()
        end.synchronize()
        times.append((start.elapsed_time(end) / 1e3 / layers, (launched - launching) / layers, planned - began))
    device, host, beginning = (statistics.median_high(kind) for kind in zip(*times[2:], strict=True))
    return device, host, beginning


# -- both sides ------------------------------------------------------------------------------


@dataclass(frozen=True)
class New:
    """Query, keys and values of the new tokens, the same for all layers."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def new_tokens() -> New:
    fused = torch.randn(CHUNK, QUERY_HEADS + 2 * HEADS, DIM, dtype=DTYPE, device="cuda")
    query, keys, values = fused.split((QUERY_HEADS, HEADS, HEADS), dim=1)
    return New(query.contiguous(), keys, values)  # strides as rotation leaves them


def on_device(new: New, prefix: int, layers: int, backend: str) -> Pass:
    length = prefix + CHUNK
    pages = length // TOKENS
    shape = (layers, pages, HEADS, TOKENS, DIM)
    keys, values = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend=backend)
    table = torch.randperm(pages, device="cuda").int()
    position = torch.arange(prefix, length, device="cuda")
    places = (table[position // TOKENS] * TOKENS + position % TOKENS).int()
    out = torch.empty_like(new.query)

    def begin() -> None:
        wrapper.plan(
            torch.tensor([0, CHUNK], dtype=torch.int32), torch.tensor([0, pages], dtype=torch.int32), table,
            torch.tensor([TOKENS], dtype=torch.int32), QUERY_HEADS, HEADS, DIM, TOKENS,
            causal=True, sm_scale=SCALE, q_data_type=DTYPE, kv_data_type=DTYPE,
        )  # fmt: skip

    def attend(layer: int) -> None:
        place_tokens(new.keys, new.values, places, keys[layer], values[layer])
        wrapper.run(new.query, (keys[layer], values[layer]), out=out)

    return Pass(begin, attend)


class HostLayers:
    """KV pools of several layers in registered host memory, with their digests on the device."""

    def __init__(self, layers: int) -> None:
        shape = (POOL_PAGES, HEADS, TOKENS, DIM)
        size = torch.Size(shape).numel() * DTYPE.itemsize
        memory = SharedRegion(SharedRegion.size_for(*[size] * 2 * layers))
        some = torch.randn(64, *shape[1:]).to(DTYPE).repeat(POOL_PAGES // 64, 1, 1, 1)
        buffers = [memory.take(shape, DTYPE).copy_(some) for _ in range(2 * layers)]
        region = RegisteredRegion(memory)
        channels = torch.arange(CHANNELS, device="cuda").repeat(HEADS, 1)
        self.layers = [
            DeviceLayer(
                HostPool(region, buffers[2 * layer], buffers[2 * layer + 1]),
                LayerDigests(
                    torch.zeros(POOL_PAGES, HEADS, 2, DIM, dtype=DTYPE, device="cuda"),
                    torch.zeros(POOL_PAGES, HEADS, TOKENS, CHANNELS // 2, dtype=torch.uint8, device="cuda"),
                    channels,
                ),
            )
            for layer in range(layers)
        ]


def on_host(new: New, prefix: int, prefill: DevicePrefill, copies: str, places: str) -> Pass:
    length = prefix + CHUNK
    first = torch.randperm(POOL_PAGES) if places == "random" else torch.arange(POOL_PAGES)
    batch = PrefillRows(first[None, : length // TOKENS], [length], [CHUNK])

    def begin() -> None:
        staging.ENGINE_RUN_BYTES = ENGINE_RUN_BYTES[copies]
        prefill.begin(batch, SCALE)

    return Pass(begin, lambda layer: prefill.attend(layer, new.query, new.keys, new.values), prefill.finish)


# -- measuring -------------------------------------------------------------------------------


def measured(
    name: str, one: Pass, args: argparse.Namespace, products: Products | None, base: float | None, **more: Any
) -> Row:
    seconds, host, beginning = timed(one, args.layers, args.repeats, products)
    share = None if base is None else round(base / seconds, 3)
    result = {
        "name": name, **more, "in a model": products is not None, "ms a layer": round(seconds * 1e3, 3),
        "host us a layer": round(host * 1e6, 1), "host us to begin": round(beginning * 1e6, 1), "share": share,
    }  # fmt: skip
    extra = " ".join(f"{key} {value}" for key, value in more.items()) + (" in a model" if products else "")
    percent = "" if share is None else f"{share:6.0%}"
    print(
        f"{name:22s} {extra:58s} {seconds * 1e3:8.3f} ms  host {host * 1e6:7.1f} us  begin {beginning * 1e6:7.0f} us "
        f"{percent}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: bench/results/cuda-prefill.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backends", nargs="+", default=["auto", "fa2"], help="of FlashInfer; the first is ours too")
    args = parser.parse_args()

    torch.manual_seed(0)
    new, products = new_tokens(), Products()
    host = HostLayers(args.layers)
    prefill = DevicePrefill(
        host.layers, (max(PREFIXES) + CHUNK) // TOKENS, QUERY_HEADS, DTYPE, "cuda", flashinfer_backend=args.backends[0]
    )
    for _ in range(300):  # until the clocks of an idle GPU have come up
        products.after()
    rows = []
    for prefix in PREFIXES:
        bases: dict[bool, float] = {}
        for backend in args.backends:
            device = on_device(new, prefix, args.layers, backend)
            for between in (None, products):
                row = measured("flashinfer", device, args, between, None, prefix=prefix, backend=backend)
                bases.setdefault(between is not None, row["ms a layer"] / 1e3)
                rows.append(row)
            del device
            torch.cuda.empty_cache()
        for places in ("neighbours", "random"):
            for copies in ("engine", "kernels"):
                one = on_host(new, prefix, prefill, copies, places)
                for between in (None, products):
                    base = bases[between is not None]
                    rows.append(measured(copies, one, args, between, base, prefix=prefix, pages=places))
    assert prefill.refused() == 0

    result = {
        "shape": {"query_heads": QUERY_HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "bfloat16", "chunk": CHUNK},
        "layers": args.layers,
        "backends": args.backends,
        "torch": torch.__version__,
        "rows": rows,
    }
    print(f"written to {write_result('cuda-prefill', result, args.out)}")


if __name__ == "__main__":
    main()
