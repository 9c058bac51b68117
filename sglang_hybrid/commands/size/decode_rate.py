"""Time of a decode step, estimated from the bytes that a step reads.

    GPU     (weights + attended KV cache + digests and sketches) / (bandwidth x efficiency)
            + layers x (latency of a layer + rows x latency of a row in a layer)
    worker  missed blocks / what the worker reads of host memory
    PCIe    recalled blocks / what copies bring

A step takes as long as the slowest of the three, and a server adds the time of its scheduler between two steps. The
constants are fitted to committed results (``committed.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.size.model_shape import ModelShape
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.settings import slots_of
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import page_bytes, rows_of, whole_request_blocks
from sglang_hybrid.policies.registry import keeps_codes_in_slots, policy_named


@dataclass(frozen=True)
class Rates:
    """Bandwidths of the hardware. The defaults are those of the machine that made the committed results."""

    gpu_tb_s: float = 4.8  # H200's data sheet
    memory_gb_s: float = 148.0  # 15 threads of 16 Xeon cores read: bench/results/bench-worker-16-xeon.json
    pcie_gb_s: float = 50.0  # gather_blocks: docs/measurements.md


@dataclass(frozen=True)
class Fit:
    efficiency: float  # share of the GPU's bandwidth that a step reaches
    layer_ms: float  # latency of a layer: launches, and for hybrid the round trip to the worker
    row_ms: float = 0.0  # latency of each row in each layer


STOCK = Fit(efficiency=0.93, layer_ms=0.055)
# The latencies are fitted by least squares of relative errors. A fit of all three constants gives an efficiency of 0.79
# and misses one result by more than 15 %, so the efficiency is fixed between 0.79 and the efficiency of stock.
HYBRID = Fit(efficiency=0.85, layer_ms=0.0622, row_ms=0.00155)
SERVER_MS = 0.2  # time between two steps of a server; a bare loop of steps has none
WORKER_EFFICIENCY = 0.77  # bandwidth of bfloat16 attention over read bandwidth, 15 threads: bench-worker-16-xeon.json
# Shares of the budget, means over those results in decode-steps-hybrid.json and qwen-decode-steps.json that select.
MISSED_SHARE = 0.064
RECALLED_SHARE = 0.011


@dataclass(frozen=True)
class StepEstimate:
    """Estimated time of one decode step, and the bytes that one GPU reads."""

    rows: int
    weights_bytes: int
    kv_bytes: int
    digest_bytes: int
    latency_ms: float  # latency of all layers: no step is shorter
    gpu_ms: float  # includes latency_ms
    worker_ms: float
    pcie_ms: float
    server_ms: float

    @property
    def ms(self) -> float:
        return max(self.gpu_ms, self.worker_ms, self.pcie_ms) + self.server_ms

    @property
    def bound_by(self) -> str:
        times = {"GPU": self.gpu_ms, "worker (host memory bandwidth)": self.worker_ms, "PCIe": self.pcie_ms}
        return max(times, key=lambda name: times[name])

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.rows / self.ms if self.rows else 0.0


def stock_step(
    model: ModelShape, rows: int, tokens: int, rates: Rates, *, gpus: int = 1, server: bool = True
) -> StepEstimate:
    """Estimate a step of full attention over ``tokens`` tokens of each row, all of them in GPU memory."""
    kv = rows * tokens * model.kv_shape(gpus).bytes_per_token
    return _step(STOCK, model, rows, rates, gpus=gpus, kv=kv, server=server)


def hybrid_step(
    model: ModelShape,
    config: HybridConfig,
    rows: int,
    tokens: int,
    rates: Rates,
    *,
    most_rows: int | None = None,
    gpus: int = 1,
    scored_share: float = 1.0,
    server: bool = True,
) -> StepEstimate:
    """Estimate a step of ``rows`` running rows with ``tokens`` tokens each.

    ``most_rows``: rows that the server has slots for, if more than ``rows``. ``scored_share``: share of the blocks that
    a step scores; servers score all blocks, older results did not.
    """
    shape = model.kv_shape(gpus)
    blocks, slots = -(-tokens // BLOCK_TOKENS), _slots(config)
    # a code has one byte, the numbers of whole requests have ``itemsize``: so many codes fit in a number's memory
    codes_per_number = shape.itemsize if keeps_codes_in_slots(config) else 1
    if config.whole_requests == "auto" and rows * blocks * codes_per_number <= rows_of(most_rows or rows) * slots:
        return stock_step(model, rows, tokens, rates, gpus=gpus, server=server)
    if policy_named(config.policy).attends_to_all(config):
        over_pcie = rows * tokens * shape.bytes_per_token
        return _step(HYBRID, model, rows, rates, gpus=gpus, kv=0, pcie=over_pcie, server=server)
    attended = rows * min(tokens, slots * BLOCK_TOKENS) * shape.bytes_per_token // codes_per_number
    digests = rows * blocks * page_bytes(config, shape, "cuda").total * scored_share
    return _step(
        HYBRID, model, rows, rates, gpus=gpus, kv=attended, digests=int(digests),
        missed=_beyond(shape, config, rows, tokens, MISSED_SHARE),
        pcie=_beyond(shape, config, rows, tokens, RECALLED_SHARE), server=server,
    )  # fmt: skip


def _slots(config: HybridConfig) -> int:
    reads_all = policy_named(config.policy).attends_to_all(config)
    return whole_request_blocks(config) if reads_all else slots_of(config)


def _beyond(shape: KVShape, config: HybridConfig, rows: int, tokens: int, share: float) -> int:
    """Return the bytes of ``share`` of the budget for all rows; 0 for rows within the budget, which miss nothing."""
    if tokens <= config.budget_tokens:
        return 0
    return int(rows * config.budget_tokens * share) * shape.bytes_per_token


def _step(
    fit: Fit,
    model: ModelShape,
    rows: int,
    rates: Rates,
    *,
    gpus: int,
    kv: int,
    digests: int = 0,
    missed: int = 0,
    pcie: int = 0,
    server: bool,
) -> StepEstimate:
    weights = model.weights_read(rows) // gpus
    latency = model.layers * (fit.layer_ms + rows * fit.row_ms)
    return StepEstimate(
        rows, weights, kv, digests,
        latency_ms=latency,
        gpu_ms=_ms(weights + kv + digests, 1000 * rates.gpu_tb_s * fit.efficiency) + latency,
        worker_ms=_ms(missed * gpus, rates.memory_gb_s * WORKER_EFFICIENCY),  # all ranks share the host's memory
        pcie_ms=_ms(pcie, rates.pcie_gb_s),
        server_ms=SERVER_MS if server else 0.0,
    )  # fmt: skip


def _ms(count: int, gb_s: float) -> float:
    return count / (gb_s * 1e6)
