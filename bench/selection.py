"""How much of the real attention each way of scoring blocks covers, on a real model and text.

    python bench/selection.py [--windows 4] [--prompt-tokens 6000] [--decode-tokens 32] [--budget 1024]

Decodes windows of English behind long prompts with exact attention and, at every layer and step,
asks each way of scoring for its selection: min/max digests with several spreads, the GQA group
reduced by the maximum of its logits or by the sum of its attention shares. Printed is the share
of attention that the selection misses. ``best block`` knows the true attention; ``best key``
knows each block's true highest logit: what digests can hope for.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from record import write_result

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.default_model import prepare_default_model
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodeBatch, LayerCache
from sglang_hybrid.policies.full import FullPolicy, read_row

SINK, RECENT = 1, 2
SPREADS = (0.0, 0.25, 0.5, 0.75, 1.0)


def max_of_logits(logits: torch.Tensor, _counts: torch.Tensor, _scale: float) -> torch.Tensor:
    return logits.amax(dim=2)


REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "max of logits": max_of_logits,
    "sum of shares": reference.block_scores,
}


class CoverageProbe(FullPolicy):
    """Attends to everything, and records what the selections would have missed."""

    def __init__(self, budget_blocks: int) -> None:
        self.budget = budget_blocks
        self.missed: dict[str, list[torch.Tensor]] = defaultdict(list)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        length, counts = batch.lengths_on_host[0], batch.block_counts(cache.block_tokens)
        blocks = int(counts[0])
        keys = cache.keys[batch.page_table[0, :blocks]]
        filled = torch.full((blocks,), cache.block_tokens)
        filled[-1] = length - (blocks - 1) * cache.block_tokens

        key, _ = read_row(cache, batch.page_table[0], length, query.device)
        q = query.view(key.shape[0], -1, query.shape[-1])
        logits = torch.einsum("hgd,hnd->hgn", q, key)
        padded = torch.nn.functional.pad(logits, (0, blocks * cache.block_tokens - length), value=-torch.inf)
        per_block = padded.unflatten(2, (blocks, -1))
        shares = (per_block * scale).flatten(2).softmax(dim=2).unflatten(2, (blocks, -1)).sum(dim=3)

        for name, scores in self._scores(query, keys, filled, per_block, shares, counts, scale):
            chosen = reference.select_blocks(scores, counts, self.budget, SINK, RECENT)[0]
            covered = shares.gather(2, chosen[:, None, :].expand(-1, shares.shape[1], -1).clamp(min=0)).sum(dim=2)
            self.missed[name].append(1 - covered.flatten())
        return super().decode(query, cache, batch, scale)

    def _scores(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        filled: torch.Tensor,
        per_block: torch.Tensor,
        shares: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield "best block", shares.sum(dim=1)[None]
        minmax = reference.minmax_digest(keys, filled)[None]
        estimates = {f"min/max, spread {s:.2f}": reference.digest_logits(query, minmax, s) for s in SPREADS}
        estimates["best key"] = per_block.amax(dim=3)[None]
        for name, logits in estimates.items():
            for reduction, reduce in REDUCTIONS.items():
                yield f"{name}; {reduction}", reduce(logits, counts, scale)


def main() -> None:
    args = parse_args()
    probe = CoverageProbe(args.budget // 32)
    model = ModelSession(
        [f"--model-path={args.model_path or prepare_default_model()}", "--attention-backend=hybrid", "--device=cpu",
         "--dtype=float32", "--hybrid=host_memory=1GiB", "--hybrid=worker=none"]
    )  # fmt: skip
    model.use_policy(probe, HybridConfig(policy="full"))
    ids = model.tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"]
    for window in range(args.windows):
        start = len(ids) * (window + 1) // (args.windows + 1)
        end = start + args.prompt_tokens
        print(f"window {window + 1} of {args.windows}: tokens {start} to {end}", file=sys.stderr, flush=True)
        prefilled = model.prefill([ids[start:end]])
        for token in ids[end : end + args.decode_tokens]:
            prefilled.step([token])

    rows = []
    for name, missed in probe.missed.items():
        all_missed = torch.stack(missed)
        rows.append(
            {
                "scoring": name,
                "missed": round(all_missed.mean().item(), 4),
                "heads_missing_over_30_percent": round((all_missed > 0.3).float().mean().item(), 4),
            }
        )
    rows.sort(key=lambda row: row["missed"])
    print(f"{'scoring':40} {'attention missed':>17} {'heads that miss > 30 %':>23}")
    for row in rows:
        print(f"{row['scoring']:40} {row['missed']:17.2%} {row['heads_missing_over_30_percent']:23.2%}")
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print(write_result("selection", {"settings": settings, "rows": rows}, args.out))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="default: the default model")
    parser.add_argument("--windows", type=int, default=4, help="places in the text, evenly spread (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--budget", type=int, default=1024, help="tokens selected (default: 1024)")
    parser.add_argument("--out", type=Path, help="default: bench/results/selection.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
