"""Number of requests that fit in memory, with stock SGLang and with hybrid: the limit, and what twice as many need.

Rows, pages and tokens are computed by the functions that a server calls: ``host_pool_bytes`` and ``plan_device``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.size.errors import SizeError
from sglang_hybrid.commands.size.model_shape import ModelShape
from sglang_hybrid.commands.size.quantities import GB
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.settings import unsupported_model, unsupported_over_fp8, unsupported_settings
from sglang_hybrid.memory.capacity import CapacityError, KVShape, host_pool_bytes
from sglang_hybrid.memory.device_capacity import DevicePlan, plan_device, rows_of

# Share of weights and KV cache in the GPU memory that is free before the model is loaded. SGLang chooses the share by
# the size of the GPU, and measures what is left after loading. Here the share is an assumption, which
# --mem-fraction-static overrides.
MEM_FRACTION_STATIC = 0.85
GPU, HOST = "GPU memory", "host memory"
_MOST_GB = 1 << 20  # maximum size of a purchase


@dataclass(frozen=True)
class Machine:
    gpu_bytes: int  # of each GPU, free before the model is loaded
    host_bytes: int  # available, shared by all ranks
    gpus: int = 1
    mem_fraction_static: float = MEM_FRACTION_STATIC


@dataclass(frozen=True)
class Requests:
    """Maximum number of requests of one length that run at a time, and the memory that limits it."""

    count: int
    limited_by: str
    by_gpu: int
    by_host: int | None  # None: host memory does not limit the number


@dataclass(frozen=True)
class Purchase:
    """Memory that must be added for ``requests`` running requests. 0: enough memory is installed."""

    requests: int
    gpu_bytes: int  # on each GPU
    host_bytes: int


class Sizing:
    """Memory needs of one model on one machine, for requests of one length."""

    def __init__(self, model: ModelShape, machine: Machine, config: HybridConfig, tokens: int) -> None:
        """``tokens``: length of prompt and answer. Raise SizeError for what the CUDA engine does not support."""
        model.check_ranks(machine.gpus)
        self.model, self.machine, self.config, self.tokens = model, machine, config, tokens
        self.shape: KVShape = model.kv_shape(machine.gpus)
        self.weights_per_gpu = -(-model.weights.total // machine.gpus)
        if why := unsupported_model(
            model.head_dim, model.head_dim, model.query_heads // model.kv_heads, self.shape.itemsize
        ):
            raise SizeError(
                f"the CUDA kernels do not serve {why}: head_dim 64 or 128, up to 16 query heads per KV head"
            )
        if model.has_fp8_cache and (why := unsupported_over_fp8(config.policy)):
            raise SizeError(f"the CUDA kernels do not serve {why}: drop --kv-cache-dtype")
        if why := unsupported_settings(config):
            raise SizeError(f"{why} is served without CUDA graphs, which cannot be sized: take policy scout or full")

    @property
    def padded_tokens(self) -> int:
        """Return the length of a request, rounded up to whole pages."""
        return -(-self.tokens // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one request's KV cache, of all GPUs together."""
        return self.machine.gpus * self.tokens * self.shape.bytes_per_token

    def gpu_left(self, gpu_bytes: int | None = None) -> int:
        """Return the bytes that SGLang leaves for the KV cache on each GPU; negative if the weights do not fit.

        ``gpu_bytes``: memory of each GPU, if not that of this machine.
        """
        memory = self.machine.gpu_bytes if gpu_bytes is None else gpu_bytes
        return int(memory * self.machine.mem_fraction_static) - self.weights_per_gpu

    # -- requests --------------------------------------------------------------------------------

    def stock(self) -> Requests:
        count = _largest(lambda requests: self._stock_fits(requests, self.machine.gpu_bytes))
        return Requests(count, GPU, count, None)

    def hybrid(self) -> Requests:
        """Return the requests that run with hybrid. Raise CapacityError for host memory that a server would refuse."""
        by_gpu = _largest(lambda requests: self._plan(requests, self.machine.gpu_bytes) is not None)
        by_host = self._host_pool(self.config, self.machine.host_bytes) // self._padded_bytes
        return Requests(min(by_gpu, by_host), GPU if by_gpu <= by_host else HOST, by_gpu, by_host)

    def plan(self, requests: int) -> DevicePlan | None:
        """Return how ``requests`` requests divide the GPU memory; None if they do not fit."""
        return self._plan(requests, self.machine.gpu_bytes)

    @property
    def _padded_bytes(self) -> int:
        return self.padded_tokens * self.shape.bytes_per_token

    def _stock_fits(self, requests: int, gpu_bytes: int) -> bool:
        return requests * self.tokens <= self.gpu_left(gpu_bytes) // self.shape.bytes_per_token

    def _plan(self, requests: int, gpu_bytes: int) -> DevicePlan | None:
        try:
            plan = plan_device(
                self.gpu_left(gpu_bytes), self.config, self.shape, rows_of(requests), self.tokens,
                device="cuda", cuda_graphs=True,
            )  # fmt: skip
        except CapacityError:
            return None
        return plan if plan.pages * BLOCK_TOKENS >= requests * self.padded_tokens else None

    def _host_pool(self, config: HybridConfig, host_bytes: int) -> int:
        return host_pool_bytes(config, self.shape, host_bytes, self.machine.gpus)

    # -- purchases -------------------------------------------------------------------------------

    def double_stock(self) -> Purchase:
        wanted = max(1, 2 * self.stock().count)
        return Purchase(wanted, self._more_gpu(lambda gpu: self._stock_fits(wanted, gpu)), 0)

    def double_hybrid(self) -> Purchase:
        wanted = max(1, 2 * self.hybrid().count)
        return Purchase(
            wanted,
            self._more_gpu(lambda gpu: self._plan(wanted, gpu) is not None),
            _more(self.machine.host_bytes, lambda host: self._host_fits(wanted, host)),
        )

    def _more_gpu(self, fits: Callable[[int], bool]) -> int:
        return _more(self.machine.gpu_bytes, fits)

    def _host_fits(self, requests: int, host_bytes: int) -> bool:
        """Return True if ``requests`` requests fit in ``host_bytes``, with the present ratio of host pool to memory."""
        now = self.config.host_memory_bytes(self.machine.host_bytes)
        pool = now * host_bytes // self.machine.host_bytes
        try:
            config = _with_pool(self.config, pool)
            return self._host_pool(config, host_bytes) >= requests * self._padded_bytes
        except CapacityError:
            return False


def _with_pool(config: HybridConfig, pool: int) -> HybridConfig:
    return msgspec.structs.replace(config, host_memory=f"{pool // 1024}KiB")


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, 0 if 1 does not. All smaller numbers must fit too."""
    above = 1
    while fits(above):
        above *= 2
    below = above // 2  # fits, or is 0
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def _more(now: int, fits: Callable[[int], bool]) -> int:
    """Return the fewest bytes, in whole GB, by which ``now`` must grow to fit; 0 if it fits."""
    missing = _largest(lambda more: more <= _MOST_GB and not fits(now + more * GB))
    return 0 if fits(now) else (missing + 1) * GB
