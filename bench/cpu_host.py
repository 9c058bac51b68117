"""Compare servers on a host without a GPU: stock SGLang (torch_native) and sglang-hybrid with default settings.

    python -m bench.cpu_host [--rounds 3] [--lengths 300,5000] [--new-tokens 48] [--hybrid KEY=VALUE ...] [--out FILE]

Each round starts one server after the other and sends both the same prompts; every round has different prompts. The
time to the first token is measured, and the decode rate from the first token to the last. Ratios are taken within a
round; the table shows their medians. Run this on a quiet machine. Stock keeps OpenMP's default wait policy, which is a
little faster for stock than the policy that our environment sets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.record import write_result
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.load import send_together
from bench.side_by_side.server import Server
from bench.side_by_side.telling import say

# Targets by prompt tokens, as multiples of stock: least decode rate, longest time to the first token.
BARS = {300: (1.0, 1.1), 5000: (1.5, 1.1)}
COMMON = ["--device", "cpu", "--dtype", "float32", "--max-running-requests", "16"]
FLAGS = {
    "stock": ["--max-total-tokens", "16384"],  # otherwise the pool takes all of the machine's memory
    "hybrid": ["--hybrid", "host_memory=4GiB"],  # like `make serve`
}


def main() -> None:
    options = parse_args()
    from sglang_hybrid.commands.model import find_model

    model = find_model(options.model_path)
    prompts = cut_prompts(model, options.rounds, options.lengths)
    sides = [Configuration("stock", "torch_native"), Configuration("hybrid", "hybrid", tuple(options.hybrid))]
    rounds: list[dict[str, Any]] = []
    for number, of_round in enumerate(prompts):
        measured = {side.name: measure(side, model, of_round, options.new_tokens) for side in sides}
        rounds.append({"load_average": os.getloadavg()[0], **measured})
        say(f"round {number + 1} of {options.rounds}: {measured}")
    summary = {str(length): summarise(rounds, str(length)) for length in options.lengths}
    show(summary)
    path = write_result("cpu-host", {"model": model.name, "rounds": rounds, "summary": summary}, options.out)
    say(f"written to {path}")


def cut_prompts(model: Path, rounds: int, lengths: list[int]) -> list[dict[int, list[int]]]:
    """Cut a prompt of each length for each round out of CPython's manual; no two prompts share a beginning."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids = list(tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"])
    cut, first = [], 0
    for _ in range(rounds):
        of_round = {}
        for length in lengths:
            of_round[length] = ids[first : first + length]
            first += length
        cut.append(of_round)
    return cut


def measure(side: Configuration, model: Path, prompts: dict[int, list[int]], new_tokens: int) -> dict[str, Any]:
    environment = {} if side.is_hybrid else {"OMP_WAIT_POLICY": ""}
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model-path", str(model), *COMMON, *FLAGS[side.name]]
        with Server(side, flags, Path(directory) / "server.log", Path(directory), environment) as server:
            send_together(server.url, [[7] * 64], 8)  # the first request pays for one-time initialization
            return {str(length): one(server.url, ids, new_tokens) for length, ids in prompts.items()}


def one(url: str, ids: list[int], new_tokens: int) -> dict[str, float]:
    # prefill gives the first new token, so ``new_tokens`` decode steps give one token more
    (row,) = send_together(url, [ids], new_tokens + 1)
    seconds = row.times[-1] - row.times[0]
    return {
        "first_token_s": round(row.times[0] - row.sent, 3),
        "tokens_per_s": round((row.tokens[-1] - row.tokens[0]) / seconds, 2),
    }


def summarise(rounds: list[dict[str, Any]], length: str) -> dict[str, Any]:
    def median(side: str, key: str) -> float:
        return float(statistics.median(one[side][length][key] for one in rounds))

    def ratios(key: str) -> list[float]:
        return [round(one["hybrid"][length][key] / one["stock"][length][key], 3) for one in rounds]

    return {
        "stock": {key: median("stock", key) for key in ("first_token_s", "tokens_per_s")},
        "hybrid": {key: median("hybrid", key) for key in ("first_token_s", "tokens_per_s")},
        "decode_ratios": ratios("tokens_per_s"),
        "first_token_ratios": ratios("first_token_s"),
    }


def show(summary: dict[str, Any]) -> None:
    table = Table("prompt tokens", "stock tokens/s", "hybrid", "ratio", "stock first token", "hybrid", "ratio", "bars")
    for length, row in summary.items():
        bar = BARS.get(int(length))
        table.add_row(
            length,
            f"{row['stock']['tokens_per_s']:.1f}", f"{row['hybrid']['tokens_per_s']:.1f}",
            f"{statistics.median(row['decode_ratios']):.2f}",
            f"{row['stock']['first_token_s']:.2f} s", f"{row['hybrid']['first_token_s']:.2f} s",
            f"{statistics.median(row['first_token_ratios']):.2f}",
            f"decode >= {bar[0]}, first token <= {bar[1]}" if bar else "",
        )  # fmt: skip
    Console().print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[300, 5000])
    parser.add_argument("--new-tokens", type=int, default=48, help="decode steps behind each prompt (default: 48)")
    parser.add_argument(
        "--model-path", type=Path, help="a model's directory or known name (default: the default model)"
    )
    parser.add_argument("--hybrid", action="append", default=[], metavar="KEY=VALUE", help="settings of our side")
    parser.add_argument("--out", type=Path, help="where the result goes (default: bench/results/cpu-host.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
