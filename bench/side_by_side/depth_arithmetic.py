"""Estimates decode steps at depths, and on machines, that were not measured.

Nothing here is a measurement, and every row says so (`kind`). A line through the measured depths, at the same number of
rows, gives the time of a step at another depth. Requests and steps on other machines are those of ``sglang-hybrid
size``: bytes over bandwidths of data sheets, with constants fitted to committed results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.synthetic_model import Character, Shape, config
from sglang_hybrid.commands.size.decode_rate import Rates, StepEstimate, hybrid_step, stock_step
from sglang_hybrid.commands.size.memory import Machine, Sizing
from sglang_hybrid.commands.size.model_shape import ModelShape, shape_of
from sglang_hybrid.commands.size.quantities import GB
from sglang_hybrid.config import HybridConfig

ARITHMETIC = "arithmetic, not measured"
ASSUMPTIONS = (
    "Steps of another depth lie on the line through the measured depths, at the same number of rows.",
    "GPU memory, its bandwidth and PCIe are those of data sheets. One GPU has the host that was measured: 148 GB/s of "
    "memory bandwidth for the worker. Eight share a host with two sockets: 480 GB/s.",
    "With tensor parallelism weights and KV heads are divided evenly, and all-reduces take no time.",
    "SGLang keeps 15 % of the GPU's memory for graphs and activations, and 70 % of host memory are the pool.",
)
Point = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """Time of a decode step as a linear function of the number of layers."""

    fixed_ms: float
    layer_ms: float

    @classmethod
    def through(cls, steps: dict[int, float]) -> Line:
        """Fit a line by least squares to ``steps``, milliseconds by layers. Raise ValueError below two depths."""
        if len(steps) < 2:
            raise ValueError("a line needs two depths")
        layers, mean = sum(steps) / len(steps), sum(steps.values()) / len(steps)
        slope = sum((x - layers) * (y - mean) for x, y in steps.items()) / sum((x - layers) ** 2 for x in steps)
        return cls(mean - slope * layers, slope)

    def at(self, layers: int) -> float:
        return self.fixed_ms + self.layer_ms * layers


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind and their host, with the numbers of data sheets."""

    name: str
    gpu_gb: float
    gpu_tb_s: float
    pcie_gb_s: float
    gpus: int = 1
    host_gb: int = 256
    memory_gb_s: float = Rates.memory_gb_s


HARDWARE = (
    Hardware("H200", 141, 4.8, 50),
    Hardware("8 H200, TP 8", 141, 4.8, 50, gpus=8, host_gb=2048, memory_gb_s=480),
    Hardware("H100 80GB", 80, 3.35, 50),
    Hardware("8 H100 80GB, TP 8", 80, 3.35, 50, gpus=8, host_gb=2048, memory_gb_s=480),
    Hardware("A100 80GB", 80, 2.04, 25),
    Hardware("L40S", 48, 0.864, 25),
    Hardware("RTX 4090", 24, 1.008, 25),
)


def steps_by_depth(points: Sequence[Point]) -> dict[tuple[str, int, int], dict[int, float]]:
    """Return (configuration, length, rows) -> layers -> milliseconds of a step."""
    found: dict[tuple[str, int, int], dict[int, float]] = {}
    for point in points:
        key = (point["configuration"], point["length"], point["rows"])
        found.setdefault(key, {})[point["layers"]] = point["step_ms"]
    return found


def other_depths(points: Sequence[Point], depths: Sequence[int]) -> list[Point]:
    """Estimate steps at ``depths``, for whatever was measured at two depths or more with the same rows."""
    rows: list[Point] = []
    for (configuration, length, count), steps in steps_by_depth(points).items():
        if len(steps) < 2:
            continue
        line = Line.through(steps)
        for layers in depths:
            step = line.at(layers)
            rows.append(
                {
                    "kind": ARITHMETIC,
                    "configuration": configuration,
                    "length": length,
                    "rows": count,
                    "layers": layers,
                    "step_ms": round(step, 3),
                    "tokens_per_s": round(1e3 * count / step, 1),
                    "line": {name: round(value, 4) for name, value in asdict(line).items()},
                }
            )
    return rows


def model_of_depth(layers: int) -> ModelShape:
    import torch

    shape = Shape(layers=layers)
    return shape_of(config(shape, Character(), torch.bfloat16), f"Qwen3-14B's shape with {layers} layers")


def estimate_errors(points: Sequence[Point]) -> list[Point]:
    """Return how far the arithmetic that ``machines`` uses is from each measured step of stock and hybrid."""
    found: list[Point] = []
    for point in points:
        model, rows, tokens = model_of_depth(point["layers"]), point["rows"], point["length"]
        if point["configuration"] == "stock":
            step = stock_step(model, rows, tokens, Rates())
        elif point["configuration"] == "hybrid":
            step = hybrid_step(model, HybridConfig(), rows, tokens, Rates(), most_rows=point["most_rows"])
        else:
            continue
        named = {name: point[name] for name in ("configuration", "layers", "length", "rows", "step_ms")}
        found.append({**named, "estimated_ms": round(step.ms, 3), "error": round(step.ms / point["step_ms"] - 1, 4)})
    return found


def machines(layers: int, length: int, answer: int, hardware: Sequence[Hardware] = HARDWARE) -> list[Point]:
    """Estimate requests and tokens per second of stock and hybrid, on machines that were not measured."""
    rows: list[Point] = []
    model, settings = model_of_depth(layers), HybridConfig()
    for one in hardware:
        machine = Machine(int(one.gpu_gb * GB), one.host_gb * GB, one.gpus)
        rates = Rates(one.gpu_tb_s, one.memory_gb_s, one.pcie_gb_s)
        sizing = Sizing(model, machine, settings, length + answer)
        tokens, stock, hybrid = length + answer // 2, sizing.stock().count, sizing.hybrid()
        theirs = stock_step(model, stock, tokens, rates, gpus=one.gpus) if stock else None
        ours = hybrid_step(model, settings, hybrid.count, tokens, rates, gpus=one.gpus) if hybrid.count else None
        rows.append(
            {
                "kind": ARITHMETIC,
                "machine": asdict(one),
                "layers": layers,
                "length": length,
                "answer": answer,
                "stock": _side(stock, theirs),
                "hybrid": {**_side(hybrid.count, ours), "limited_by": hybrid.limited_by},
                "speed_up": round(ours.tokens_per_s / theirs.tokens_per_s, 2) if ours and theirs else None,
            }
        )
    return rows


def _side(requests: int, step: StepEstimate | None) -> Point:
    if step is None:
        return {"requests": 0, "step_ms": None, "tokens_per_s": None, "bound_by": "nothing fits beside the weights"}
    return {
        "requests": requests, "step_ms": round(step.ms, 3), "tokens_per_s": round(step.tokens_per_s, 1),
        "bound_by": step.bound_by,
    }  # fmt: skip
