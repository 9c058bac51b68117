"""How well selections by smaller digests and codes agree with those by the largest, on a real model and text.

    python bench/fp8_digests.py [--prompt-tokens 8000 4000] [--windows 2] [--decode-tokens 8]

Decodes windows of English behind long prompts with exact attention, then scores every layer's blocks by the real
queries: with sketches, and with digests that went through each of several encodings. Codes of the sketches are made
with the encoded digests, since a reader has no others.

    equal    of the blocks that bfloat16 digests select (without those that are always in), the share that is selected
             with the encoding too; ``worst layer``: of the layer where it is least
    lost     of the true attention, the share that the selection loses against that of bfloat16 digests

``bytes`` are those of a block's digest with head_dim 128 and 32 sketch channels. Rows
``outliers`` have keys with a constant of 64 added in two channels, as models with a bias on keys have them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import write_result

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.default_model import prepare_default_model
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodeBatch, LayerCache
from sglang_hybrid.policies.full import FullPolicy

TOKENS, SINK, RECENT = 32, 1, 2
ALWAYS = SINK + RECENT + 1
BUDGETS = (2048, 1024)
FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
OUTLIER = 64.0


class Recorder(FullPolicy):
    """Attends to everything, and keeps the queries of every layer and the channels of its sketch."""

    def __init__(self) -> None:
        self.queries: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.channels: dict[int, torch.Tensor] = {}
        self.scale = 0.0

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        assert cache.sketch is not None
        self.queries[cache.layer].append(query[0].to(torch.bfloat16).float())
        self.channels[cache.layer], self.scale = cache.sketch.channels, scale
        return super().decode(query, cache, batch, scale)


# -- encodings: digests [n, H, 2, D] to what a reader gets of them --------------------------


def float8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST, LARGEST).to(FLOAT8).float()


def float8_outward(digests: torch.Tensor) -> torch.Tensor:
    """Maxima up and minima down to the next number of float8."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    numbers = numbers[numbers.isfinite()].unique()
    highest, lowest = digests.unbind(2)
    up = numbers[torch.searchsorted(numbers, highest.contiguous()).clamp(max=len(numbers) - 1)]
    down = numbers[(torch.searchsorted(numbers, lowest.contiguous(), right=True) - 1).clamp(min=0)]
    return torch.stack((up, down), dim=2)


def whole(values: torch.Tensor, largest: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Whole numbers of ``bits`` bits, times a scale with which they reach ``largest``."""
    most = 2 ** (bits - 1) - 1
    unit = (largest / most).clamp(min=1e-12)
    return (values / unit).round().clamp(-most, most) * unit


def split(digests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    highest, lowest = digests.unbind(2)
    return (highest + lowest) / 2, (highest - lowest) / 2


def joined(middle: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.stack((middle + radius, middle - radius), dim=2)


def scaled_float8(digests: torch.Tensor) -> torch.Tensor:
    scale = digests.abs().amax(dim=(2, 3), keepdim=True) / LARGEST
    return float8(digests / scale) * scale


def middle_and_float8(digests: torch.Tensor) -> torch.Tensor:
    middle, radius = split(digests)
    return joined(middle.to(torch.bfloat16).float(), float8(radius))


def both_float8(digests: torch.Tensor) -> torch.Tensor:
    middle, radius = split(digests)
    return joined(float8(middle), float8(radius))


def by_block(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda digests: whole(digests, digests.abs().amax(dim=(2, 3), keepdim=True), bits)


def by_channel(margin: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Offset and scale of each channel of a KV head, from the first quarter of the prompt."""

    def encoded(digests: torch.Tensor) -> torch.Tensor:
        known = digests[: len(digests) // 4]
        highest, lowest = known[:, :, 0].amax(dim=0), known[:, :, 1].amin(dim=0)
        offset = ((highest + lowest) / 2)[None, :, None]
        return whole(digests - offset, ((highest - lowest) / 2 * margin)[None, :, None]) + offset

    return encoded


def in_groups(digests: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    return reference.expand_digest(reference.compact_digest(digests, channels), channels, digests.shape[3])


def middle_by_block(digests: torch.Tensor) -> torch.Tensor:
    middle, radius = split(digests)
    return joined(whole(middle, middle.abs().amax(dim=2, keepdim=True)), radius.half().float())


Encoding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PLAIN: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "max, min: float8 e4m3": (256, float8),
    "max, min: float8 e4m3, a scale for each block": (272, scaled_float8),
    "max, min: float8 e4m3, rounded outward": (256, float8_outward),
    "middle bfloat16, radius float8": (384, middle_and_float8),
    "middle and radius float8": (256, both_float8),
    "max, min: int8, a scale for each block": (272, by_block(8)),
    "max, min: int4, a scale for each block": (144, by_block(4)),
    "max, min: int8, scales of channels from the prompt": (256, by_channel(1.25)),
    "max, min: int8, twice these scales": (256, by_channel(2.0)),
    "middle int8, a scale for each block; steps float16": (208, middle_by_block),
}
ENCODINGS: dict[str, tuple[int, Encoding]] = {
    "bfloat16": (512, lambda digests, _: digests),
    **{name: (size, lambda digests, _, way=way: way(digests)) for name, (size, way) in PLAIN.items()},
    "middle int8, a scale for 16 channels; steps float16": (reference.compact_bytes(128, 32), in_groups),
}

# -- agreement -------------------------------------------------------------------------------


def selections(
    keys: torch.Tensor, queries: torch.Tensor, digests: torch.Tensor, channels: torch.Tensor, scale: float
) -> dict[int, torch.Tensor]:
    """For each budget which candidates are selected: ``[queries, KV heads, candidates]``."""
    blocks = keys.shape[0]
    codes = reference.sketch_codes(keys, digests, channels)
    logits = [reference.sketch_logits(q[None], digests[None], codes[None], channels, scale) for q in queries]
    scores = reference.block_scores(torch.cat(logits), torch.full((len(queries),), blocks), scale)
    candidates = scores[:, :, SINK : blocks - RECENT - 1]
    chosen = {}
    for budget in BUDGETS:
        best = candidates.topk(budget // TOKENS - ALWAYS, dim=2).indices
        chosen[budget] = torch.zeros_like(candidates, dtype=torch.bool).scatter_(2, best, True)
    return chosen


def measure(
    keys: torch.Tensor, queries: torch.Tensor, channels: torch.Tensor, scale: float
) -> dict[tuple[str, int], tuple[float, float]]:
    """One layer of one prompt, keys ``[blocks, H, 32, D]``: (encoding, budget) -> (equal, lost)."""
    blocks, heads, _, dim = keys.shape
    exact = reference.minmax_digest(keys, torch.full((blocks,), TOKENS)).float()
    asked = queries.view(len(queries), heads, -1, dim)
    logits = torch.einsum("shgd,nhtd->shgnt", asked, keys.float()) * scale
    attention = logits.flatten(3).softmax(dim=3).unflatten(3, (blocks, -1)).sum(dim=4).mean(dim=2)
    attention = attention[:, :, SINK : blocks - RECENT - 1]
    found, base = {}, selections(keys, queries, exact, channels, scale)
    for name, (_, encode) in ENCODINGS.items():
        chosen_by_budget = selections(keys, queries, encode(exact, channels), channels, scale)
        for budget, chosen in chosen_by_budget.items():
            equal = float((chosen & base[budget]).sum() / base[budget].sum())
            lost = float((attention * base[budget]).sum(dim=2).mean() - (attention * chosen).sum(dim=2).mean())
            found[name, budget] = (equal, lost)
    return found


def with_outliers(keys: torch.Tensor) -> torch.Tensor:
    """A constant on the pair of channels that is rotated slowest: rotation leaves it nearly as it is."""
    keys, half = keys.float(), keys.shape[3] // 2
    keys[..., half - 1] += OUTLIER
    keys[..., 2 * half - 1] += OUTLIER
    return keys.to(torch.bfloat16)


def main() -> None:
    args = parse_args()
    recorder = Recorder()
    model = ModelSession(
        [f"--model-path={args.model_path or prepare_default_model()}", "--attention-backend=hybrid", "--device=cpu",
         "--dtype=float32", "--hybrid=host_memory=1GiB", "--hybrid=worker=none"]
    )  # fmt: skip
    model.use_policy(recorder, HybridConfig(policy="full"))
    ids = model.tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"]
    results: dict[tuple[str, int, str, int], list[list[tuple[float, float]]]] = defaultdict(list)
    for tokens in args.prompt_tokens:
        for window in range(args.windows):
            start = len(ids) * (window + 1) // (args.windows + 1)
            end = start + tokens
            print(f"{tokens} tokens, window {window + 1} of {args.windows}", file=sys.stderr, flush=True)
            prefilled = model.prefill([ids[start:end]])
            recorder.queries.clear()
            for token in ids[end : end + args.decode_tokens]:
                prefilled.step([token])
            layers: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
            for layer, asked in recorder.queries.items():
                keys = model.keys(layer, tokens // TOKENS * TOKENS).to(torch.bfloat16)
                keys = keys.unflatten(1, (-1, TOKENS)).transpose(0, 1).contiguous()
                for kind, these in (("text", keys), ("outliers", with_outliers(keys))):
                    found = measure(these, torch.stack(asked), recorder.channels[layer], recorder.scale)
                    for (name, budget), one in found.items():
                        layers[kind, name, budget].append(one)
            for (kind, name, budget), of_layers in layers.items():
                results[kind, tokens, name, budget].append(of_layers)

    rows = []
    for (kind, tokens, name, budget), windows in results.items():
        values = torch.tensor(windows)  # [windows, layers, (equal, lost)]
        row = {"keys": kind, "encoding": name, "bytes": ENCODINGS[name][0]}
        row |= {"prompt_tokens": tokens, "budget": budget}
        equal, lost = values.mean(dim=(0, 1)).tolist()
        worst = values[..., 0].mean(dim=0).min().item()
        rows.append({**row, "equal": round(equal, 4), "worst_layer": round(worst, 4), "lost": round(lost, 5)})
        print(rows[-1])
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "model_path")}
    print(write_result("fp8-digests", {"settings": settings, "rows": rows}, args.out))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="default: the default model")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[8000, 4000])
    parser.add_argument("--windows", type=int, default=2, help="places in the text, evenly spread (default: 2)")
    parser.add_argument("--decode-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, help="default: bench/results/fp8-digests.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
