"""``python -m bench.chaos``: injects random faults into a real server and compares every answer.

Two servers run in turn, one that predicts queries and one that does not. Both have a budget far below the context and a
pool so small that requests are retracted and pages reused all the time. Long runs also test a disaggregated set that
loses its instances. --seed decides which faults happen; when they happen depends on the machine. The model keeps its
first layers only, so that prompts take seconds. The exit status is 1 if a token was wrong, a request was lost or
failed, or something was leaked.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.chaos.run import Findings, Phase, Tell
from bench.chaos.target import Target, TargetError
from bench.chaos.workload import Request, make_requests, source_text
from sglang_hybrid.config import load_config
from sglang_hybrid.origin import origin
from sglang_hybrid.policies.registry import policy_named

LAYERS = 6
SCOUT = (
    "budget_tokens=256", "scout.resident_tokens=192", "scout.recall_interval=3", "worker=start",
    "worker_restart_seconds=0.3",
)  # fmt: skip
PREDICTIONS = ("raw", "none")
_LONG_RUN_MINUTES = 10.0
_CPU = ("--device", "cpu", "--dtype", "float32", "--sleep-on-idle")
_CUDA = (
    "--dtype", "bfloat16", "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "1", "2", "4", "8",
    "--mem-fraction-static", "0.3",
)  # fmt: skip
_CHUNK = 512  # tokens of a prompt that one step prefills
_LONGEST_ANSWER_STEPS = 61  # steps of one request alone: answers of 48 tokens, some of them three at a time
_PEERS_SHARE = 0.2  # of the run's time
_LONGEST_OF_PEERS = 1500  # tokens of a prompt: stock SGLang recomputes all tokens before each chunk


def parse(argv: Sequence[str]) -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid chaos",
        description=__doc__.partition("\n\n")[2], epilog="Needs Linux and two free cores.",
    )  # fmt: skip
    add = parser.add_argument
    add("--minutes", type=float, default=15.0, help="how long faults happen, in all (default: %(default)s)")
    add("--seed", type=int, default=1, help="what is asked and what goes wrong (default: %(default)s)")
    add("--model-path", type=Path, help="a model's directory or known name (default: the default model)")
    add("--longest", type=int, help="tokens of the longest prompt (default: 6000, or 1500 in short runs)")
    add("--layers", type=int, default=LAYERS, help="that the model keeps, on a CPU (default: %(default)s)")
    add("--requests", type=int, help="different requests (default: 20, or 10 in short runs)")
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: faults of the worker and aborted requests only, "
        "and texts may differ where two tokens are about as good (default: cpu)",
    )
    add("--no-peers", action="store_true", help="leave out the disaggregated set")
    add("--prediction", choices=PREDICTIONS, action="append", help="only this one (default: both in turn)")
    add(
        "--hybrid", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the servers, instead of ours; budgets and windows must hold 160 tokens, for answers of "
        "short prompts with a grammar are taken to be exact",
    )  # fmt: skip
    add("--stop-at-first", action="store_true", help="end a server's turn when something is found to be wrong")
    add("--json", type=Path, metavar="FILE", help="write the summary there, too")
    add("--keep", type=Path, metavar="DIRECTORY", help="where servers' logs are kept (default: nowhere)")
    add("--bug", action="append", default=[], help=argparse.SUPPRESS)  # switched on in the server; the run must find it
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    is_long = arguments.minutes >= _LONG_RUN_MINUTES
    longest = arguments.longest or (6000 if is_long else 1500)
    count = arguments.requests or (20 if is_long else 10)
    predictions = arguments.prediction or list(PREDICTIONS)
    on_cpu = arguments.device == "cpu"

    from sglang_hybrid.commands.model import find_model

    model = find_model(arguments.model_path)
    asked = _requests(model, arguments.seed, count, longest)
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    findings = Findings()
    why_no_peers = "they are left out" if arguments.no_peers else _why_no_peers(arguments)
    peers_seconds = 0.0 if why_no_peers else _PEERS_SHARE * arguments.minutes * 60
    seconds = (arguments.minutes * 60 - peers_seconds) / len(predictions)
    with tempfile.TemporaryDirectory(prefix="sglang-hybrid-chaos-") as temporary:
        for prediction in predictions:
            directory = (arguments.keep or Path(temporary)) / prediction
            flags = _flags(prediction, longest, arguments)
            tell(f"prediction={prediction}: starting a server, its log is {directory / 'server.log'}")
            try:
                retract_steps = _LONGEST_ANSWER_STEPS + 2 * (longest // _CHUNK)
                bugs, folder = arguments.bug, directory.absolute()
                with Target(model, flags, folder, retract_steps, bugs, on_cpu, _has_worker(arguments)) as target:
                    phase = Phase(
                        target, asked, arguments.seed, tell, arguments.stop_at_first,
                        # a GPU computes with the real query in the worker's place
                        differs_without_worker=not on_cpu and prediction != "none",
                    )  # fmt: skip
                    findings.add(phase.run(seconds))
            except TargetError as error:
                tell(str(error))
                findings.failed += 1
                findings.examples.append(str(error))
        if why_no_peers:
            tell(f"no disaggregated set: {why_no_peers}")
        else:
            findings.add(_with_peers(model, asked, peers_seconds, arguments, Path(temporary), tell))
    summary = _summary(arguments, findings, longest, count, predictions)
    print(_in_words(findings))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if findings.is_clean else 1


def _why_no_peers(arguments: argparse.Namespace) -> str:
    if arguments.device != "cpu":
        return "it is made for CPUs"
    if arguments.minutes < _LONG_RUN_MINUTES:
        return f"it takes a minute to start one, and only runs of {_LONG_RUN_MINUTES:g} minutes or more do"
    try:
        import mooncake.engine  # noqa: F401
        import sglang_router  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def _with_peers(
    model: Path, asked: list[Request], seconds: float, arguments: argparse.Namespace, temporary: Path, tell: Tell
) -> Findings:
    from bench.chaos.peers import Peers, PeersPhase

    directory = (arguments.keep or temporary) / "peers"
    tell(f"a disaggregated set: starting it, its logs are in {directory}")
    short = [request for request in asked if len(request.ids) <= _LONGEST_OF_PEERS]
    try:
        with Peers(model, arguments.layers, directory.absolute()) as peers:
            return PeersPhase(peers, short, arguments.seed, tell).run(seconds)
    except TargetError as error:
        tell(str(error))
        return Findings(failed=1, examples=[str(error)])


def _requests(model: Path, seed: int, count: int, longest: int) -> list[Request]:
    from transformers import AutoTokenizer

    chance = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(source_text(chance), verbose=False)["input_ids"]
    return make_requests(ids, chance, count, longest)


def _flags(prediction: str, longest: int, arguments: argparse.Namespace) -> list[str]:
    settings = [*SCOUT, f"prediction={prediction}", "host_memory=1GiB", *arguments.hybrid]
    pool = (longest + 1024) // 32 * 32  # the longest prompt, and a few others beside it
    return [
        *(part for setting in settings for part in ("--hybrid", setting)),
        "--random-seed", "1", "--enable-metrics", "--max-running-requests", "8", "--max-total-tokens", str(pool),
        "--chunked-prefill-size", str(_CHUNK), "--watchdog-timeout", "1800",
        # requests are admitted though they may not all fit: some will be retracted
        "--schedule-conservativeness", "0.01",
        *((*_CPU, *_first_layers(arguments.layers)) if arguments.device == "cpu" else _CUDA),
    ]  # fmt: skip


def _has_worker(arguments: argparse.Namespace) -> bool:
    config = load_config(None, [*SCOUT, *arguments.hybrid])
    return policy_named(config.policy).needs.worker and config.worker != "none"


def _first_layers(count: int) -> tuple[str, str]:
    return "--json-model-override-args", json.dumps({"num_hidden_layers": count})


def _summary(
    arguments: argparse.Namespace, findings: Findings, longest: int, count: int, predictions: Sequence[str]
) -> dict[str, Any]:
    return {
        "origin": origin(),
        "settings": {
            "predictions": list(predictions),
            "hybrid": [*SCOUT, *arguments.hybrid],
            "device": arguments.device,
            "layers": arguments.layers if arguments.device == "cpu" else "all",
            "longest prompt": longest,
            "different requests": count,
        },
        "faults survived": findings.faults.total(),
        **{
            key.replace("_", " "): dict(value) if isinstance(value, Counter) else value
            for key, value in vars(findings).items()
        },
    }


def _in_words(findings: Findings) -> str:
    leaked = ", ".join(f"{count} {name}" for name, count in findings.leaked.items()) or "nothing"
    faults = "\n".join(f"  {count:5} {name}" for name, count in findings.faults.most_common())
    rows = ", ".join(f"{count} {name}" for name, count in findings.rows_by.most_common())
    examples = "".join(f"\n! {example}" for example in findings.examples[:10])
    return (
        f"\n{findings.faults.total()} faults survived:\n{faults}\n"
        f"answers          {findings.answers}, {findings.tokens} tokens; {findings.aborted} aborted, "
        f"{findings.retracted} retracted ({findings.retracted_with_other_text} went on with another text), "
        f"{findings.left_at_ties} left at ties\n"
        f"wrong tokens     {findings.wrong_tokens}\n"
        f"lost requests    {findings.lost}\n"
        f"failed requests  {findings.failed}\n"
        f"leaked           {leaked}\n"
        f"longest pause    {findings.longest_pause:.2f} s\n"
        f"misses           {rows}{examples}"
    )


if __name__ == "__main__":
    sys.exit(main())
