"""Perplexity of decode steps at a budget, against full attention, on a real model and text.

    python bench/perplexity.py [--windows 8] [--prompt-tokens 6000] [--decode-tokens 64] [--budget 1024]

Places are spread evenly over CPython's ``pydoc_data.topics``, or given with ``--starts``. Behind each prompt the
text itself is decoded token by token, once with policy ``full`` and once with policy ``scout``, so that errors add
up as they would in an answer. One process per policy: SGLang's state is global.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import torch
from record import write_result

from sglang_hybrid.default_model import prepare_default_model
from sglang_hybrid.integration.teacher_forcing import TeacherForcedDecode

_SCORES = "SCORES "


def score(args: argparse.Namespace) -> None:
    """The child's part: print the logprobs of all places, as JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TeacherForcedDecode(
        [f"--model-path={args.model_path}", "--attention-backend=hybrid", f"--device={device}", "--dtype=float32",
         "--hybrid=host_memory=1GiB", *(f"--hybrid={setting}" for setting in args.hybrid)]
    )  # fmt: skip
    ids = model.tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"]
    starts = args.starts or [len(ids) * (n + 1) // (args.windows + 1) for n in range(args.windows)]
    scores = []
    for number, start in enumerate(starts, 1):
        end = start + args.prompt_tokens
        print(f"  place {number} of {len(starts)}: tokens {start} to {end}", file=sys.stderr, flush=True)
        scores.append(model.logprobs(ids[start:end], ids[end : end + args.decode_tokens]).tolist())
    print(_SCORES + json.dumps({"starts": starts, "logprobs": scores}))


def run_child(*settings: str) -> dict[str, list[list[float]]]:
    print(" ".join(settings), file=sys.stderr, flush=True)
    hybrid = [argument for setting in settings for argument in ("--hybrid", setting)]
    done = subprocess.run(
        [sys.executable, *sys.argv, "--child", *hybrid],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith(_SCORES))
    scores: dict[str, list[list[float]]] = json.loads(line.removeprefix(_SCORES))
    return scores


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    args = parse_args()
    if args.child:
        score(args)
        return
    full = run_child("policy=full")
    scout = run_child("policy=scout", f"budget_tokens={args.budget}")
    places = []
    print(f"{'prompt starts at token':>22} {'full':>8} {'scout':>8} {'change':>8}")
    for start, a, b in zip(full["starts"], full["logprobs"], scout["logprobs"], strict=True):
        places.append({"start": start, "full": round(perplexity(a), 3), "scout": round(perplexity(b), 3)})
        print(f"{start:22} {perplexity(a):8.3f} {perplexity(b):8.3f} {perplexity(b) / perplexity(a) - 1:+8.2%}")
    all_full, all_scout = (perplexity(list(chain(*scores["logprobs"]))) for scores in (full, scout))
    print(f"{'all':>22} {all_full:8.3f} {all_scout:8.3f} {all_scout / all_full - 1:+8.2%}")
    result = {"budget": args.budget, "prompt_tokens": args.prompt_tokens, "decode_tokens": args.decode_tokens}
    result |= {"full": all_full, "scout": all_scout, "change": all_scout / all_full - 1, "places": places}
    write_result("perplexity", result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help="default: the default model")
    parser.add_argument("--windows", type=int, default=8, help="places in the text, evenly spread (default: 8)")
    parser.add_argument("--starts", type=int, nargs="+", help="places in the text, by token, instead")
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=1024, help="tokens that scout attends to (default: 1024)")
    parser.add_argument("--hybrid", action="append", default=[], metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--out", type=Path, help="default: bench/results/perplexity.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model_path = args.model_path or prepare_default_model()
    return args


if __name__ == "__main__":
    main()
