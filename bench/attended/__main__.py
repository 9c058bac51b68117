"""Measure what decode steps lose by attending to a part of the blocks, for several variants of which part.

    python -m bench.attended --model DIR --prompts FILE --out FILE [--tasks vt,fwe] [--samples 8] [--seconds 1200]
    python -m bench.attended --model DIR --text-make FILE        and with --text FILE on a host without a tokenizer

A model like Llama or Qwen2 runs in plain torch, on a GPU if there is one, without SGLang. It is calibrated as a server
would do it. Each prompt of RULER (`--prompts`, a file of ``sglang-hybrid eval --ruler-make``) is prefilled, and full
attention decodes an answer. Then the steps of that answer are computed again for every variant, which is fed the same
tokens. Reported are the KL of a step's logits to those of full attention, in how many prompts a first step would have
chosen another token, and how many blocks of a (layer, KV head) a step reads from host memory.

Variant "served" is what a GPU server with default settings attends to, if it copies all misses (scout.cpu_share=0).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.attended.calibrated import Calibrated, calibrate, made_text, read_text, write_text
from bench.attended.plain_model import PlainModel, read_shape
from bench.attended.selection import Rules
from bench.attended.steps import answered, full_attention, simulate
from bench.attended.table import by_length, show
from bench.attended.variants import VARIANTS, Variant, variants_of
from bench.lease import Lease
from bench.record import write_result
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler.prompts_file import read_prompts
from sglang_hybrid.commands.eval.ruler.scoring import PREFIX
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.scout.calibration_text import CalibrationText

NAME = "attended"


def chosen(prompts: Sequence[RetrievalPrompt], tasks: str | None, samples: int | None) -> list[RetrievalPrompt]:
    """Return the first ``samples`` prompts of each task and length, in turn: a run that ends early has some of each.

    ``tasks``: names separated by commas; None: all. Raise InputError for a task that has no prompts.
    """
    of_kind: dict[tuple[str, int], list[RetrievalPrompt]] = {}
    for prompt in prompts:
        of_kind.setdefault((prompt.task.removeprefix(PREFIX), prompt.length), []).append(prompt)
    known = list(dict.fromkeys(task for task, _ in of_kind))
    wanted = known if tasks is None else tasks.split(",")
    if unknown := [task for task in wanted if task not in known]:
        raise InputError(f"--tasks {', '.join(unknown)}: the prompts are of {', '.join(known)}")
    kinds = [found[:samples] for (task, _), found in of_kind.items() if task in wanted]
    return [found[turn] for turn in range(max(map(len, kinds))) for found in kinds if turn < len(found)]


def check(prompts: Sequence[RetrievalPrompt], text: CalibrationText, vocabulary: int, budget: int) -> None:
    """Raise InputError for prompts within the ``budget``, and for tokens that are not in the ``vocabulary``."""
    for prompt in prompts:
        if len(prompt.ids) <= budget:
            raise InputError(
                f"a prompt of {prompt.task} has {len(prompt.ids)} tokens: within the budget of {budget} every step "
                "attends to all of them; take longer prompts"
            )
    windows = [("calibration text", window) for window in (*text.fit, *text.unseen, *text.special)]
    for name, ids in (*windows, *((f"a prompt of {prompt.task}", prompt.ids) for prompt in prompts)):
        if max(ids) >= vocabulary:
            raise InputError(
                f"{name} has token {max(ids)}, and the model's vocabulary ends at {vocabulary - 1}: make it with this "
                "model's tokenizer"
            )


def measure(
    model: PlainModel,
    calibrated: Calibrated,
    rules: Rules,
    prompt: RetrievalPrompt,
    variants: dict[str, Variant],
    most: int,
) -> dict[str, Any]:
    """Return the steps of all variants behind ``prompt``, whose answer has at most ``most`` tokens."""
    row = answered(model, calibrated, rules, prompt.ids, min(prompt.new_tokens, most))
    told: dict[str, Any] = {
        "task": prompt.task.removeprefix(PREFIX), "length": prompt.length, "steps": row.steps, "variants": {},
    }  # fmt: skip
    if not row.steps:  # the answer ended with its first token
        return told
    full = full_attention(model, row).log_softmax(dim=-1)
    for name, variant in variants.items():
        steps = simulate(model, calibrated, rules, row, variant)
        kl = (full.exp() * (full - steps.logits.log_softmax(dim=-1))).sum(dim=-1)
        changed = (steps.logits.argmax(dim=-1) != full.argmax(dim=-1)).nonzero().flatten().tolist()
        told["variants"][name] = {
            "kl": [round(value, 6) for value in kl.tolist()],
            "first_change": changed[0] if changed else None,  # step, from 0 on
            "late": [round(value, 2) for value in steps.late.tolist()],
        }
    return told


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attended", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory with config.json and *.safetensors")
    add("--prompts", type=Path, help="of eval --ruler-make, longer than the budget")
    add("--out", type=Path, help="result file, written after each prompt")
    add("--text", type=Path, help="calibration text of --text-make (default: made with the model's tokenizer)")
    add("--text-make", type=Path, metavar="FILE", help="write the calibration text's tokens to this file and end")
    add("--tasks", help="names separated by commas (default: all of the file)")
    add("--samples", type=int, help="prompts of each task and length (default: all of the file)")
    add("--variants", default=",".join(VARIANTS), help="names separated by commas (default: %(default)s)")
    add("--most", type=int, default=40, help="tokens of an answer (default: %(default)s)")
    add("--seconds", type=float, help="no prompt begins that would not end within this time (default: no limit)")
    args = parser.parse_args(argv)
    if not args.text_make and not (args.prompts and args.out):
        parser.error("--prompts and --out are needed, unless --text-make is given")
    return args


def run(args: argparse.Namespace) -> None:
    """Do what the arguments ask for. Raise InputError if it cannot be done."""
    lease, begun = Lease(args.seconds), time.monotonic()
    shape = read_shape(args.model)
    if args.text_make:
        write_text(args.text_make, made_text(args.model, shape))
        return
    config, variants = HybridConfig(), variants_of(args.variants)
    prompts = chosen(read_prompts(args.prompts)[1], args.tasks, args.samples)
    text = read_text(args.text) if args.text else made_text(args.model, shape)
    check(prompts, text, shape.vocabulary, config.budget_tokens)
    longest = max(len(prompt.ids) for prompt in prompts) + args.most
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PlainModel.load(args.model, max(longest, shape.context), device)
    calibrated, rules = calibrate(model, text, config), Rules.of(config, shape)
    print(f"calibrated after {time.monotonic() - begun:.0f} s, mean cosine {calibrated.cosine:.3f}", flush=True)
    found: list[dict[str, Any]] = []
    slowest = 0.0
    for number, prompt in enumerate(prompts):
        if not lease.allows(slowest):
            print(f"the time is over after {number} of {len(prompts)} prompts", flush=True)
            break
        start = time.monotonic()
        found.append(measure(model, calibrated, rules, prompt, variants, args.most))
        slowest = max(slowest, time.monotonic() - start)
        result = {"cosine": calibrated.cosine, "planned": len(prompts), "summary": by_length(found), "prompts": found}
        write_result(NAME, result, args.out)
        print(f"{number + 1}/{len(prompts)} {prompt.task} {time.monotonic() - begun:.0f} s", flush=True)
    print(show(found))


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    try:
        run(parsed(argv))
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
