#!/usr/bin/env python3
"""How well two-level scoring agrees with reading the sketches of all blocks. Plain torch, any device.

    python bench/two_levels.py [--out FILE] [--rows 2] [--device cpu]

The first level scores all blocks by the middle of their digests' ranges (512 bytes of a block with head_dim 128 in
bfloat16), or by that middle in float8 e4m3 with a scale for each block (130 bytes); the second reads sketches (512
bytes more) for the best blocks of the first. Budget: 64 of 1,024 blocks, per KV head.

    equal       of the blocks that one level selects, the share that two levels select too
    missed      of the true attention, the share that is not in the selected blocks

`random`: keys and queries of independent normal numbers, where all blocks are nearly alike. `clustered`: a text of
topics, keys around the middle of their topic, queries toward one or two of them. `needles`: random keys, and for every
query a few single tokens that it looks for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import write_result

from sglang_hybrid.ops import reference

HEADS, GROUP, DIM, TOKENS, BLOCKS, BUDGET, CHANNELS = 8, 5, 128, 32, 1024, 64, 32
SCALE = DIM**-0.5
SECOND_LEVELS = (0, 64, 128, 192, 256, 384, 512)
Text = tuple[torch.Tensor, torch.Tensor]  # keys [blocks, H, 32, D], query [1, H * G, D]


def random_text() -> Text:
    return torch.randn(BLOCKS, HEADS, TOKENS, DIM), torch.randn(1, HEADS * GROUP, DIM) * 2


def clustered_text(topics: int = 48) -> Text:
    """Runs of 8 to 96 tokens of a topic."""
    middles = torch.randn(HEADS, topics, DIM) * 0.7
    tokens = BLOCKS * TOKENS
    runs = torch.randint(8, 97, (tokens // 8,))
    topic = torch.randint(0, topics, runs.shape).repeat_interleave(runs)[:tokens]
    keys = middles[:, topic] + torch.randn(HEADS, tokens, DIM) * 0.7
    wanted = torch.randint(0, topics, (2, HEADS, GROUP))
    heads = torch.arange(HEADS)[:, None]
    query = middles[heads, wanted[0]] + 0.5 * middles[heads, wanted[1]] + torch.randn(HEADS, GROUP, DIM)
    return keys.view(HEADS, BLOCKS, TOKENS, DIM).transpose(0, 1).contiguous(), query.flatten(0, 1)[None]


def needle_text(needles: int = 20) -> Text:
    keys, query = random_text()
    asked = query.view(HEADS, GROUP, DIM)
    for head in range(HEADS):
        for one in range(GROUP):
            at = torch.randint(0, BLOCKS * TOKENS, (needles,))
            keys[at // TOKENS, head, at % TOKENS] += asked[head, one] * 0.35
    return keys, query


def selected(scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, scores.topk(BUDGET, dim=2).indices, True)


def float8(middle: torch.Tensor) -> torch.Tensor:
    scale = middle.abs().amax(dim=-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (middle / scale).to(torch.float8_e4m3fn).float() * scale


def measured(text: Callable[[], Text], device: str) -> dict[tuple[str, int], tuple[float, float]]:
    """(first level, size of the second) -> (equal, missed); size -1 is one level."""
    keys, query = (part.to(torch.bfloat16).to(device) for part in text())
    counts = torch.tensor([BLOCKS], device=device)
    digests = reference.minmax_digest(keys, torch.full((BLOCKS,), TOKENS, device=device))
    # those that tell most: a profile chooses by how much q_c k_c varies
    q = query.float().view(HEADS, GROUP, DIM)
    spread = keys.float().transpose(0, 1).flatten(1, 2).std(dim=1) * q.square().mean(dim=1).sqrt()
    channels = spread.argsort(dim=1, descending=True)[:, :CHANNELS].contiguous()
    codes = reference.sketch_codes(keys, digests, channels)
    sketched = reference.sketch_logits(query, digests[None], codes[None], channels, SCALE)
    tokens = torch.einsum("hgd,nhtd->hgnt", q, keys.float()) * SCALE
    attention = tokens.flatten(2).softmax(dim=2).view(HEADS, GROUP, BLOCKS, TOKENS).sum(dim=3).mean(dim=1)

    def missed(mask: torch.Tensor) -> float:
        return float(attention.masked_fill(mask[0], 0.0).sum(dim=1).mean())

    one = selected(reference.block_scores(sketched, counts, SCALE))
    found = {("", -1): (1.0, missed(one))}
    middle = digests.float().mean(dim=2)
    for first, by in (("middle", middle), ("middle, float8", float8(middle))):
        logits = torch.einsum("hgd,nhd->hgn", q, by)[None] + torch.tensor(float(TOKENS)).log() / SCALE
        ranked = reference.block_scores(logits, counts, SCALE)
        for second in SECOND_LEVELS:
            best = torch.zeros_like(ranked, dtype=torch.bool)
            if second:
                best.scatter_(2, ranked.topk(second, dim=2).indices, True)
            mixed = torch.where(best[:, :, None, :], sketched, logits)
            two = selected(reference.block_scores(mixed, counts, SCALE))
            found[first, second] = (float((one & two).sum() / one.sum()), missed(two))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: bench/results/two-levels.json")
    parser.add_argument("--rows", type=int, default=2, help="texts of each kind; results are their mean")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    rows = []
    for kind, text in (("random", random_text), ("clustered", clustered_text), ("needles", needle_text)):
        runs = [measured(text, args.device) for _ in range(args.rows)]
        for first, second in runs[0]:
            equal, missed = (sum(run[first, second][i] for run in runs) / len(runs) for i in range(2))
            row = {"text": kind, "first_level": first or None, "second_level": None if second < 0 else second}
            rows.append({**row, "equal": round(equal, 4), "missed": round(missed, 4)})
            print(rows[-1], flush=True)
    shape = {
        "kv_heads": HEADS,
        "group": GROUP,
        "head_dim": DIM,
        "blocks": BLOCKS,
        "budget": BUDGET,
        "channels": CHANNELS,
    }
    print(f"written to {write_result('two-levels', {'shape': shape, 'texts': args.rows, 'rows': rows}, args.out)}")


if __name__ == "__main__":
    main()
