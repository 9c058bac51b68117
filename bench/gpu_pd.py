"""Test stock prefill with hybrid decode on one GPU with real transfers, while rows and pages are reused.

    python -m bench.gpu_pd --model DIR [--transfer nixl] [--requests 48] [--rows 6] [--new-tokens 96] --out FILE

This program compares answers only; `python -m bench.pd_load` measures speed.

Three servers run: first one alone, then two together:

    stock     a single server, whose answers are the reference
    pd        stock prefill instance and hybrid decode instance; every request goes to both, as a router would send it

The decode instance has few rows and a small pool, and SGLang retracts a request every few steps: so other requests
reuse rows and pages all the time. Contexts are below the budget, so attention is exact. Where an answer differs from
stock's, stock's two best tokens must have been within --tie there: two stock backends differ by as much in bfloat16.
The exit status is 1 if the result is red.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from bench.free_port import free_port
from bench.gates.cases import token_ids
from bench.pd.instances import DECODE, ENVIRONMENT, PREFILL, instance_flags
from bench.pd.transfer import HELP, require_transfer
from bench.record import write_result
from bench.serving.killing import first_differences
from bench.serving.watching import wait_until_idle
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.server import Server
from bench.side_by_side.telling import log_tail, say

NAME = "gpu-pd"
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


def main() -> None:
    args = parsed()
    require_transfer(args.transfer)
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        prompts = prompts_of(args)
        expected = by_stock(args, logs, prompts)
        result = by_both(args, logs, prompts, expected)
    path = write_result(NAME, result, args.out)
    say(f"{'all green' if result['passed'] else 'RED'}, written to {path}")
    sys.exit(not result["passed"])


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Return ``--requests`` prompts with random lengths from 20 tokens to just below ``--longest``."""
    lengths = [random.Random(n).randrange(20, args.longest) for n in range(args.requests)]
    ids = token_ids(args.model, sum(lengths))
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def common(args: argparse.Namespace, rows: int) -> list[str]:
    return [
        "--model-path", str(args.model), "--skip-tokenizer-init", "--random-seed", "1", "--page-size", "32",
        "--sampling-backend", "pytorch", "--max-running-requests", str(rows),
        "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *map(str, range(1, rows + 1)),
    ]  # fmt: skip


def by_stock(args: argparse.Namespace, logs: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    flags = [*common(args, args.rows), "--max-total-tokens", "65536", "--mem-fraction-static", "0.2"]
    with Server(Configuration("stock", args.stock_backend), flags, logs / "stock.log", logs, ENVIRONMENT) as server:
        say(f"stock serves after {server.start_seconds:.0f} s")
        more = {"return_logprob": True, "top_logprobs_num": 2}
        return together(lambda n: ask(server.url, args, prompts[n], **more), len(prompts), args.rows)


def by_both(
    args: argparse.Namespace, logs: Path, prompts: list[list[int]], expected: list[dict[str, Any]]
) -> dict[str, Any]:
    args.bootstrap = free_port()
    prefill = Server(
        Configuration("stock", args.stock_backend),
        [*common(args, args.rows), *instance_flags(PREFILL, args.transfer, args.bootstrap),
         "--max-total-tokens", "65536", "--mem-fraction-static", "0.2"],
        logs / "prefill.log", logs, ENVIRONMENT,
    )  # fmt: skip
    settings = ("host_memory=2GiB", *args.hybrid)
    decode = Server(
        Configuration("hybrid", "hybrid", settings),
        [*common(args, args.rows), *instance_flags(DECODE, args.transfer, args.bootstrap),
         "--max-total-tokens", str(args.pool), "--mem-fraction-static", "0.4"],
        logs / "decode.log", logs, ENVIRONMENT | STRICT | RETRACTING,
    )  # fmt: skip
    result: dict[str, Any] = {"settings": list(settings), "command": decode.command[1:], "requests": len(prompts)}
    try:
        with prefill, decode:
            say(f"prefill and decode serve after {prefill.start_seconds:.0f} and {decode.start_seconds:.0f} s")
            answers = together(lambda n: ask_both(prefill, decode, args, prompts[n], n), len(prompts), 2 * args.rows)
            result["held"] = wait_until_idle(decode.url)
    except Exception as error:
        print("\n".join(log_tail(logs / "decode.log") + log_tail(logs / "prefill.log")), flush=True)
        return result | {"passed": False, "error": f"{type(error).__name__}: {str(error)[:1000]}"}
    log = (logs / "decode.log").read_text(errors="replace")
    found = compare(expected, answers, args.tie)
    retracted = log.count("Retract requests") + log.count("#retracted_reqs: 1")
    leaks = [line[:300] for line in log.splitlines() if "leak" in line.lower() and "destroy_process_group" not in line]
    result |= found | {"retracted": retracted, "leaks": leaks[:5]}
    result["passed"] = not found["others"] and not leaks and retracted > 0 and result["held"].get("running") == 0
    say(f"{found['equal']} of {len(prompts)} answers are stock's, {len(found['ties'])} left it at a tie")
    say(f"{retracted} were retracted")
    return result


def compare(expected: list[dict[str, Any]], answers: list[dict[str, Any]], tie: float) -> dict[str, Any]:
    places = first_differences([one["output_ids"] for one in expected], [one["output_ids"] for one in answers])
    found: dict[str, Any] = {"equal": places.count(None), "ties": [], "others": []}
    for answer, token in enumerate(places):
        if token is None:
            continue
        best = expected[answer]["meta_info"]["output_top_logprobs"]
        gap = round(best[token][0][0] - best[token][1][0], 4) if token < len(best) else None
        kind = "ties" if gap is not None and gap <= tie else "others"
        found[kind].append({"answer": answer, "token": token, "gap": gap})
    return found


def together(ask_one: Any, count: int, at_once: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask_one, range(count)))


def ask(url: str, args: argparse.Namespace, ids: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    reply = requests.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling} | more, timeout=300)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer


def ask_both(prefill: Server, decode: Server, args: argparse.Namespace, ids: list[int], number: int) -> dict[str, Any]:
    """Send a request to both instances, as a router does, and return the decode instance's answer.

    The instances match their halves of the request by ``bootstrap_room``.
    """
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": args.bootstrap, "bootstrap_room": 1000 + number}
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(ask, prefill.url, args, ids, **room)
        answer = ask(decode.url, args, ids, **room)
        begun.result()
    return answer


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--transfer", default="nixl", help=f"default nixl; {HELP}")
    parser.add_argument("--stock-backend", default="flashinfer", help="attention backend of stock (default flashinfer)")
    parser.add_argument("--hybrid", metavar="KEY=VALUE", action="append", default=[], help="setting; may be repeated")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rows", type=int, default=6, help="that decode at once (default 6)")
    parser.add_argument("--longest", type=int, default=900, help="prompt, in tokens (default 900)")
    parser.add_argument("--pool", type=int, default=8192, help="tokens of the decode instance's pool (default 8192)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--tie", type=float, default=0.3, help="logprobs so close are equal to rounding (default 0.3)")
    parser.add_argument("--logs", type=Path, help="where logs stay; default: nowhere")
    parser.add_argument("--out", type=Path, help=f"default: bench/results/{NAME}.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
