"""The answer of ``sglang-hybrid size`` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_hybrid.commands.size.committed import error_ranges
from sglang_hybrid.commands.size.quantities import format_bytes

_KINDS = {
    "weights": "weights",
    "kv": "KV cache of all requests",
    "resident_slots": "resident slots",
    "scores": "scores",
    "digests": "digests",
    "sketches": "sketches",
    "staging": "prefill staging",
    "graphs_and_reserve": "graphs and reserve",
    "unused": "unused",
    "host_kv": "KV cache in host memory",
}
_SIDES = ("stock", "hybrid")


def print_answer(answer: Mapping[str, Any], console: Console) -> None:
    for line in _heading(answer):
        console.print(line, soft_wrap=True)
    for table in (_requests(answer), _bytes(answer), _rates(answer)):
        console.print(table)
    for line in _closing(answer):
        console.print(line, soft_wrap=True)


def _heading(answer: Mapping[str, Any]) -> list[str]:
    model, request, machine = answer["model"], answer["request"], answer["machine"]
    quantised = f", quantised by {model['quantisation']}" if model["quantisation"] else ""
    return [
        f"{model['name']}: {model['architecture']}, {model['layers']} layers, {model['kv_heads']} KV heads x "
        f"{model['head_dim']}, {model['dtype']}{quantised}, weights {format_bytes(model['weights_bytes'])} "
        f"({model['weights_from']})",
        f"a request: {request['context_tokens']:,} + {request['answer_tokens']:,} tokens, "
        f"{format_bytes(request['kv_bytes'])} of KV cache in {request['kv_cache_dtype']}",
        f"machine: {machine['gpus']} x {format_bytes(machine['gpu_bytes'])} of GPU memory, "
        f"{format_bytes(machine['host_bytes'])} of host memory",
        f"assumed: mem_fraction_static={machine['mem_fraction_static']:g}, the share of GPU memory that SGLang gives "
        "weights and KV cache",
    ]


def _table(title: str) -> Table:
    table = Table("", *_SIDES, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _requests(answer: Mapping[str, Any]) -> Table:
    table = _table("Requests at a time")
    sides = [answer[side] for side in _SIDES]
    table.add_row("requests", *(f"{side['requests']:,}" for side in sides), style="bold")
    table.add_row("limited by", *(side["limited_by"] for side in sides))
    for name, key in (("GPU memory", "requests_by_gpu_memory"), ("host memory", "requests_by_host_memory")):
        table.add_row(f"{name} holds", *("" if side[key] is None else f"{side[key]:,}" for side in sides))
    table.add_row("for twice as many", *(_purchase(side["to_double"]) for side in sides))
    return table


def _purchase(double: Mapping[str, int]) -> str:
    wanted = [
        f"+{format_bytes(double[key])} {name}"
        for key, name in (("gpu_bytes", "GPU memory"), ("host_bytes", "host memory"))
        if double[key]
    ]
    return "\n".join([f"{double['requests']:,} requests:", *(wanted or ["nothing more"])])


def _bytes(answer: Mapping[str, Any]) -> Table:
    table = _table("Memory, of each GPU")
    for key, name in _KINDS.items():
        if key == "host_kv":
            table.add_section()
        values = [answer[side]["bytes"].get(key) for side in _SIDES]
        if any(values):
            table.add_row(name, *(format_bytes(value) if value else "" for value in values))
    return table


def _rates(answer: Mapping[str, Any]) -> Table:
    table = _table("Decode, estimated by bytes, not measured")

    def row(name: str, of: str, key: str, form: str) -> None:
        estimates = [answer[side][of] for side in _SIDES]
        table.add_row(name, *("" if one is None else format(one[key], form) for one in estimates))

    row("tokens/s, all requests", "decode_estimate", "tokens_per_s", ",.0f")
    row("tokens/s, one request alone", "decode_estimate_of_one_request", "tokens_per_s", ",.0f")
    row("step, ms", "decode_estimate", "step_ms", ".2f")
    row("least by latency of layers, ms", "decode_estimate", "least_ms_by_latency_of_layers", ".2f")
    row("bound by", "decode_estimate", "bound_by", "")
    return table


def _rates_from(assumptions: Mapping[str, Any]) -> str:
    flags = {"gpu_tb_s": "--gpu-bandwidth", "memory_gb_s": "--memory-bandwidth", "pcie_gb_s": "--pcie"}
    given = [flags[name] for name in assumptions["rates_given"]]
    return f"those of {assumptions['rates_of']}" + (f" but for {', '.join(given)}" if given else "")


def _closing(answer: Mapping[str, Any]) -> list[str]:
    machine, basis = answer["machine"], answer["basis"]
    lines = [
        f"rates: GPU {machine['gpu_tb_s']:g} TB/s, host memory {machine['memory_gb_s']:g} GB/s, PCIe "
        f"{machine['pcie_gb_s']:g} GB/s; {_rates_from(answer['assumptions'])}",
        f"fitted to steps of {basis['machine']} in bench/results: GPU efficiency {basis['stock']['efficiency']:g} "
        f"(stock), {basis['hybrid']['efficiency']:g} (hybrid). The estimate is off there by:",
    ]
    for side in _SIDES:
        ranges = error_ranges(hybrid=side == "hybrid").items()
        lines.append(f"  {side}: " + ", ".join(f"{file} {low:+.0%} to {high:+.0%}" for file, (low, high) in ranges))
    for why in dict.fromkeys(one["why"] for one in basis["left_out"]):
        points = [one for one in basis["left_out"] if one["why"] == why]
        names = ", ".join(f"{one['configuration']} {one['rows']} x {one['tokens'] // 1024}k" for one in points)
        lines.append(f"  left out ({names}): {why}")
    lines += [f"note: {note}" for note in answer["notes"]]
    if answer["serve"]:
        lines.append(f"holds for: sglang-hybrid serve --model-path MODEL {' '.join(answer['serve'])}")
    return lines
