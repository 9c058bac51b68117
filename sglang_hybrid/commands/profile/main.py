"""``sglang-hybrid profile``: make a profile of a model, or codebooks of its keys."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hybrid import __version__
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.model import DefaultModelError
from sglang_hybrid.config import ConfigError
from sglang_hybrid.integration.session_flags import add_model_flags

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    from rich.console import Console

    from sglang_hybrid.commands.profile.build_profile import make_profile
    from sglang_hybrid.commands.profile.summary import print_summary, write_plot
    from sglang_hybrid.policies.scout.profile import ProfileError

    console = Console(stderr=True)
    if options.codebook is not None:
        return _codebooks(options, _notes(argv), console)

    try:
        profile, path = make_profile(options, _notes(argv), console)
    except (InputError, ConfigError, ProfileError, DefaultModelError) as error:
        print(f"sglang-hybrid profile: {error}", file=sys.stderr)
        return 2
    print_summary(profile, Console())
    plot = write_plot(profile, path.with_suffix(".png"))
    print(f"{path}\n{plot}")
    print(f"serve with it: sglang-hybrid serve --hybrid profile={path} --hybrid budget_tokens={options.budget}")
    return 0


def _codebooks(options: argparse.Namespace, notes: dict[str, object], console: Console) -> int:
    from sglang_hybrid.commands.profile.build_codebook import make_codebooks
    from sglang_hybrid.policies.scout.profile import ProfileError

    try:
        made = make_codebooks(options, notes, console)
        made.codebooks.save(options.codebook)
    except (InputError, ConfigError, ProfileError, DefaultModelError, OSError) as error:
        print(f"sglang-hybrid profile: {error}", file=sys.stderr)
        return 2
    print("\n".join(made.lines()))
    print(options.codebook)
    settings = f"--hybrid policy=hcattention --hybrid hcattention.codebook={options.codebook}"
    print(f"serve with it: sglang-hybrid serve {settings}")
    return 0


def _notes(argv: Sequence[str]) -> dict[str, object]:
    command = shlex.join(["sglang-hybrid", "profile", *argv])
    return {"command": command, "release": __version__, "date": date.today().isoformat()}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid profile",
        description="Make a profile of a model at a budget: the calibrated predictor, and for each layer the sticky "
        "bonus and the recall interval. Takes minutes on a small model. With --codebook, make codebooks of its keys "
        "instead, for policy hcattention.",
    )
    add_model_flags(parser)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="what the profile is made on: text or LongBench jsonl, best several kinds that resemble what will be "
        "served (default: Python's language reference). Generated retrieval prompts come on top",
    )  # fmt: skip
    text.add_argument("--windows", type=int, default=6, help="pieces of each text to fit on (default: 6)")
    text.add_argument("--window-tokens", type=int, default=4096, help="tokens of each (default: 4096)")
    decode = parser.add_argument_group("decode")
    decode.add_argument("--prompts", type=int, default=3, help="prompts to decode behind (default: 3)")
    decode.add_argument("--prompt-tokens", type=int, default=6144, help="tokens of each (default: 6144)")
    decode.add_argument("--steps", type=int, default=256, help="decode steps behind each (default: 256)")
    what = parser.add_argument_group("profile")
    what.add_argument("--budget", type=int, default=2048, help="budget_tokens that will be served (default: 2048)")
    what.add_argument("--beta", type=float, default=0.12, help="CPU compute ratio to stay under (default: 0.12)")
    what.add_argument(
        "--rank", default="auto", type=_rank,
        help="of the predictor's correction: auto (per layer, the smallest that keeps the gain), full, or a number "
        "(default: auto)",
    )  # fmt: skip
    what.add_argument(
        "--predictor-of", type=Path, metavar="PROFILE", help="take the predictor of another profile of this model "
        "instead of fitting one, such as one for another budget",
    )  # fmt: skip
    what.add_argument(
        "--hybrid", action="append", default=[], metavar="KEY=VALUE", help="settings that will be served, as in serve"
    )
    what.add_argument("--out", type=Path, help="default: configs/profiles/MODEL-BUDGET.safetensors, its plot beside it")
    _add_codebook(parser)
    return parser.parse_args(argv)


def _add_codebook(parser: argparse.ArgumentParser) -> None:
    codebook = parser.add_argument_group(
        "codebooks of keys", "For policy hcattention, by k-means over keys of the text that comes with the package: "
        "pip install 'sglang-hybrid[codebook]'.",
    )  # fmt: skip
    codebook.add_argument("--codebook", type=Path, metavar="OUT", help="make codebooks, and no profile")
    codebook.add_argument(
        "--groups", type=int, help="indices of a key (default: one for each channel, with 256 centroids 25 %% of the "
        "memory; the paper's 25 %% and 12.5 %% are 64 and 32 with 8192 centroids and head_dim 128)",
    )  # fmt: skip
    codebook.add_argument(
        "--centroids", type=int, default=256, help="of each codebook; up to 256 an index takes one byte, not two "
        "(default: 256)",
    )  # fmt: skip
    codebook.add_argument(
        "--shared", action="store_true", help="one codebook for all groups of a KV head: faster to make, smaller, and "
        "what most of the paper's results have",
    )  # fmt: skip
    codebook.add_argument("--key-tokens", type=int, default=32768, help="tokens to record keys of (default: 32768)")
    codebook.add_argument("--context", type=int, help="longest context that will be served (default: the model's)")


def _rank(text: str) -> int | str:
    if text in ("auto", "full"):
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be auto, full or a number from 1 on")
