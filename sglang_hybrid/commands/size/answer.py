"""The answer of ``sglang-hybrid size`` as plain values, from which the table and the JSON document are made."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.size import committed, decode_rate
from sglang_hybrid.commands.size.decode_rate import Rates, StepEstimate, hybrid_step, stock_step
from sglang_hybrid.commands.size.memory import GPU, HOST, Purchase, Requests, Sizing
from sglang_hybrid.memory.device_capacity import DevicePlan
from sglang_hybrid.policies.registry import policy_named


def answer_of(sizing: Sizing, rates: Rates, context: int, answer: int) -> dict[str, Any]:
    """Return the answer for requests of ``context`` prompt tokens and ``answer`` answer tokens.

    Raises CapacityError for host memory that a server would refuse.
    """
    stock, hybrid = sizing.stock(), sizing.hybrid()
    model, machine, config = sizing.model, sizing.machine, sizing.config
    typical = context + answer // 2  # tokens of a request in the middle of its answer
    gpus = machine.gpus
    alone = {
        "stock": stock_step(model, 1, typical, rates, gpus=gpus),
        "hybrid": hybrid_step(model, config, 1, typical, rates, most_rows=hybrid.count, gpus=gpus),
    }
    full = {
        "stock": stock_step(model, stock.count, typical, rates, gpus=gpus),
        "hybrid": hybrid_step(model, config, hybrid.count, typical, rates, gpus=gpus),
    }
    return {
        "model": {
            "name": model.name, "architecture": model.architecture, "layers": model.layers,
            "query_heads": model.query_heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim,
            "made_for_tokens": model.most_tokens, "dtype": model.dtype, "quantisation": model.quantisation,
            "weights_bytes": model.weights.total, "weights_from": model.weights_from,
        },
        "request": {
            "context_tokens": context, "answer_tokens": answer, "kv_bytes": sizing.kv_bytes,
            "kv_cache_dtype": "fp8_e4m3" if model.has_fp8_cache else model.dtype,
        },
        "machine": {**asdict(machine), **asdict(rates)},
        "settings": {"policy": config.policy, "budget_tokens": config.budget_tokens, "host_memory": config.host_memory},
        "assumptions": _assumptions(sizing, rates),
        "stock": _side(stock, full["stock"], alone["stock"], sizing.double_stock(), _stock_bytes(sizing, stock)),
        "hybrid": _side(hybrid, full["hybrid"], alone["hybrid"], sizing.double_hybrid(), _hybrid_bytes(sizing, hybrid)),
        "serve": _serve(sizing, hybrid),
        "basis": _basis(),
        "notes": _notes(sizing, hybrid, rates),
    }  # fmt: skip


def _side(
    requests: Requests, full: StepEstimate, alone: StepEstimate, double: Purchase, by_kind: dict[str, int]
) -> dict[str, Any]:
    fits = requests.count > 0
    return {
        "requests": requests.count,
        "limited_by": requests.limited_by,
        "requests_by_gpu_memory": requests.by_gpu,
        "requests_by_host_memory": requests.by_host,
        "bytes": by_kind,
        "decode_estimate": _rate(full) if fits else None,
        "decode_estimate_of_one_request": _rate(alone) if fits else None,
        "to_double": asdict(double),
    }


def _rate(step: StepEstimate) -> dict[str, Any]:
    return {
        "tokens_per_s": round(step.tokens_per_s, 1),
        "step_ms": round(step.ms, 3),
        "bound_by": step.bound_by,
        "least_ms_by_latency_of_layers": round(step.latency_ms, 3),
        "gpu_ms": round(step.gpu_ms, 3),
        "worker_ms": round(step.worker_ms, 3),
        "pcie_ms": round(step.pcie_ms, 3),
        "gpu_reads_bytes": {"weights": step.weights_bytes, "kv": step.kv_bytes, "digests": step.digest_bytes},
    }


# -- bytes by kind, per GPU unless the key says host -------------------------------------------------------------------


def _stock_bytes(sizing: Sizing, requests: Requests) -> dict[str, int]:
    kv = requests.count * sizing.tokens * sizing.shape.bytes_per_token
    return _with_rest(sizing, {"weights": sizing.weights_per_gpu, "kv": kv}) | {"host_kv": 0}


def _hybrid_bytes(sizing: Sizing, requests: Requests) -> dict[str, int]:
    taken = {"weights": sizing.weights_per_gpu}
    plan: DevicePlan | None = sizing.plan(requests.count) if requests.count else None
    if plan is not None:
        pages = requests.count * sizing.padded_tokens // BLOCK_TOKENS
        taken |= {
            "resident_slots": plan.taken.slots,
            "scores": plan.taken.scores,
            "digests": pages * plan.page.digests,
            "sketches": pages * plan.page.sketches,
            "staging": plan.taken.staging,
        }
    kv = requests.count * sizing.padded_tokens * sizing.shape.bytes_per_token
    return _with_rest(sizing, taken) | {"host_kv": kv * sizing.machine.gpus}


def _with_rest(sizing: Sizing, taken: dict[str, int]) -> dict[str, int]:
    """Return ``taken`` with SGLang's reserve for graphs and activations, and the unused rest, added."""
    memory = sizing.machine.gpu_bytes
    reserve = memory - int(memory * sizing.machine.mem_fraction_static)
    return taken | {"graphs_and_reserve": reserve, "unused": max(0, memory - reserve - sum(taken.values()))}


# -- what the answer rests on ------------------------------------------------------------------------------------------


def _assumptions(sizing: Sizing, rates: Rates) -> dict[str, Any]:
    given = [name for name, value in asdict(rates).items() if value != getattr(Rates(), name)]
    return {
        "mem_fraction_static": sizing.machine.mem_fraction_static,
        "rates_of": committed.MACHINE,
        "rates_given": given,  # rates that the user gave instead
        "missed_share_of_budget": decode_rate.MISSED_SHARE,
        "recalled_share_of_budget": decode_rate.RECALLED_SHARE,
    }


def _serve(sizing: Sizing, hybrid: Requests) -> list[str]:
    """Return the flags of ``sglang-hybrid serve`` for which the numbers hold; empty if no request fits."""
    machine = sizing.machine
    flags = ["--max-running-requests", str(hybrid.count), "--context-length", str(sizing.tokens)]
    flags += ["--mem-fraction-static", f"{machine.mem_fraction_static:g}"]
    if machine.gpus > 1:
        flags += ["--tp-size", str(machine.gpus)]
    if sizing.model.has_fp8_cache:
        flags += ["--kv-cache-dtype", "fp8_e4m3"]
    defaults = type(sizing.config)().by_key()
    for key, value in sizing.config.by_key().items():
        if value != defaults.get(key):
            flags += ["--hybrid", f"{key}={value}"]
    return flags if hybrid.count else []


def _basis() -> dict[str, Any]:
    return {
        "machine": committed.MACHINE,
        "stock": asdict(decode_rate.STOCK),
        "hybrid": asdict(decode_rate.HYBRID),
        "server_ms": decode_rate.SERVER_MS,
        "results": [
            {
                "file": f"bench/results/{one.file}",
                "configuration": "hybrid" if one.hybrid else "stock",
                "tokens": one.tokens,
                "rows": one.rows,
                "variant": one.variant,
                "measured_ms": one.step_ms,
                "estimated_ms": round(one.estimated_ms, 3),
                "error": round(one.error, 4),
            }
            for one in committed.RESULTS
        ],
        "left_out": [
            {
                "file": f"bench/results/{one.file}",
                "configuration": one.variant or ("hybrid" if one.hybrid else "stock"),
                "tokens": one.tokens,
                "rows": one.rows,
                "measured_ms": one.step_ms,
                "why": why,
            }
            for one, why in committed.LEFT_OUT.items()
        ],
    }


def _notes(sizing: Sizing, hybrid: Requests, rates: Rates) -> list[str]:
    model, machine = sizing.model, sizing.machine
    notes = []
    if sizing.gpu_left() <= 0:
        notes.append(
            f"the weights take {sizing.weights_per_gpu / 1e9:.1f} GB of each GPU, more than "
            f"{machine.mem_fraction_static:.0%} of its {machine.gpu_bytes / 1e9:.1f} GB: nothing is left for requests"
        )
    if model.most_tokens is not None and sizing.tokens > model.most_tokens:
        notes.append(
            f"a request has {sizing.tokens} tokens, but the model was made for {model.most_tokens}: serve refuses "
            "longer ones unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
    if hybrid.limited_by == HOST:
        pool = sizing.config.host_memory_bytes(machine.host_bytes)
        notes.append(
            f"host_memory={sizing.config.host_memory} makes {pool / 1e9:.1f} of {machine.host_bytes / 1e9:.1f} GB the "
            "host pool; --hybrid host_memory=90% takes more if nothing else needs the memory"
        )
    if rates == Rates():
        notes.append(
            f"rates are those of {committed.MACHINE}: give --gpu-bandwidth, --memory-bandwidth and --pcie for others"
        )
    if hybrid.count > committed.MOST_ROWS:
        notes.append(f"at most {committed.MOST_ROWS} requests were measured at a time: the rate is extrapolated")
    if model.has_fp8_cache:
        notes.append("no step over FP8 was measured: its bytes are taken to be read as fast as those of 16 bits")
    if machine.gpus > 1:
        notes.append("several GPUs were never measured: weights are divided evenly, and all-reduces take no time here")
    if hybrid.limited_by == GPU and hybrid.count:
        notes.append("a smaller budget_tokens makes resident slots smaller and lets more requests run")
    policy = sizing.config.policy
    if policy_named(policy).attends_to_all(sizing.config):
        notes.append(f"policy {policy} reads all blocks over PCIe unless all requests fit in the slots: not measured")
    elif policy != committed.POLICY:
        notes.append(f"the decode rate is that of policy {committed.POLICY}: {policy} was not measured")
    if model.experts:
        notes.append("no mixture of experts was measured: tokens are taken to choose their experts independently")
    return notes
