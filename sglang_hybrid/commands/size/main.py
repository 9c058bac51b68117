"""``sglang-hybrid size``: command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_hybrid.commands.size.committed import MACHINE
from sglang_hybrid.commands.size.decode_rate import Rates
from sglang_hybrid.commands.size.errors import SizeError
from sglang_hybrid.commands.size.memory import MEM_FRACTION_STATIC, Machine, Sizing
from sglang_hybrid.commands.size.model_shape import ARCHITECTURES, read_model
from sglang_hybrid.commands.size.quantities import bytes_of, tokens_of
from sglang_hybrid.config import ConfigError
from sglang_hybrid.config_flags import add_config_flags, config_of_arguments
from sglang_hybrid.memory.capacity import CapacityError

_DESCRIPTION = f"""\
Say how many requests of one length fit on a machine, for stock SGLang and for this backend, what limits them, how fast
they decode, and what memory doubles their number. Needs neither a GPU nor SGLang.

MODEL is a directory in Hugging Face's layout, or its config.json. Known architectures:
{", ".join(ARCHITECTURES)}.
Weights are counted in safetensors files where there are some, and by arithmetic from config.json where not.
"""
_EPILOG = """\
Requests and bytes come from the functions that a server calls at its start. One number is assumed:
--mem-fraction-static, because SGLang measures at its start what memory is left. The decode rate is an estimate by
bytes, fitted to the results in bench/results; the output says how far it is off there. Other GPUs and hosts
were not measured: their rates only replace those of the measured machine. Time to the first token, prefix
caches and requests of other lengths are not estimated.

examples:
  sglang-hybrid size MODEL --gpu-memory 24GB --host-memory 128GB --context 32k --answer 1k
  sglang-hybrid size MODEL --gpu-memory 80GB --host-memory 1TB --context 64k --answer 1k --tp 2 --gpu-bandwidth 3.35
  sglang-hybrid size MODEL --gpu-memory 24GB --host-memory 128GB --context 32k --answer 1k --hybrid budget_tokens=1024
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 2 for input that cannot be sized."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        config, _sources = config_of_arguments(arguments)
        context, answer = tokens_of(args.context), tokens_of(args.answer)
        machine = Machine(bytes_of(args.gpu_memory), bytes_of(args.host_memory), args.tp, args.mem_fraction_static)
        rates = Rates(args.gpu_bandwidth, args.memory_bandwidth, args.pcie)
        _check(args)
        model = read_model(args.model)
        if args.kv_cache_dtype == "fp8_e4m3":
            model = replace(model, kv_itemsize=1)
        sizing = Sizing(model, machine, config, context + answer)
        from sglang_hybrid.commands.size.answer import answer_of

        result = answer_of(sizing, rates, context, answer)
    except (SizeError, ConfigError, CapacityError) as error:
        print(f"sglang-hybrid size: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    from rich.console import Console

    from sglang_hybrid.commands.size.table import print_answer

    print_answer(result, Console(highlight=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Rates()
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid size", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model's directory, or its config.json")
    need = parser.add_argument_group("what to size")
    need.add_argument("--gpu-memory", required=True, metavar="SIZE", help="of each GPU, free before the start: 24GB")
    need.add_argument("--host-memory", required=True, metavar="SIZE", help="available on the host: 128GB")
    need.add_argument("--context", required=True, metavar="TOKENS", help="of a prompt: 32k is 32,768")
    need.add_argument("--answer", default="1k", metavar="TOKENS", help="of an answer (default: 1k)")
    need.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the model (default: 1)")
    need.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto",
        help="as SGLang's flag, of both sides (default: auto, 16 bits)",
    )  # fmt: skip
    need.add_argument(
        "--mem-fraction-static", type=float, default=MEM_FRACTION_STATIC, metavar="SHARE",
        help="as SGLang's flag: share of GPU memory for weights and KV cache; the rest is for graphs and activations "
        f"(default: {MEM_FRACTION_STATIC}; SGLang chooses one by the GPU's size)",
    )  # fmt: skip
    rates = parser.add_argument_group(f"rates (defaults: the machine of the committed results, {MACHINE})")
    rates.add_argument(
        "--gpu-bandwidth", type=float, default=default.gpu_tb_s, metavar="TB/S",
        help=f"of GPU memory, by its data sheet (default: {default.gpu_tb_s:g})",
    )  # fmt: skip
    rates.add_argument(
        "--memory-bandwidth", type=float, default=default.memory_gb_s, metavar="GB/S",
        help=f"of host memory, as the worker's threads read it (default: {default.memory_gb_s:g})",
    )  # fmt: skip
    rates.add_argument(
        "--pcie", type=float, default=default.pcie_gb_s, metavar="GB/S",
        help=f"of copies from host to GPU (default: {default.pcie_gb_s:g})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables, with every point of the fit")
    add_config_flags(parser.add_argument_group("settings of the backend"))
    return parser


def _check(args: argparse.Namespace) -> None:
    for flag in ("gpu_bandwidth", "memory_bandwidth", "pcie"):
        if not 0 < getattr(args, flag) < 1e6:
            raise SizeError(f"--{flag.replace('_', '-')} {getattr(args, flag):g} must be above 0")
    if not 0 < args.mem_fraction_static < 1:
        raise SizeError(f"--mem-fraction-static {args.mem_fraction_static:g} must be above 0 and below 1, such as 0.85")
    if args.tp < 1:
        raise SizeError(f"--tp {args.tp} must be a whole number from 1 on")
