"""Description of what a session process loads, and the flags of SGLang's command line that load it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

# Bytes per value in the KV cache. A CPU uses float32, and the pool is sized for the larger of CPU and GPU.
_ITEMSIZE = 4
_SPARE = 1.1
_MIB = 1 << 20


@dataclass(frozen=True)
class Load:
    """What a session process loads: one model, its settings and engine, and the size of its KV pool."""

    model: str  # directory of the model
    settings: tuple[str, ...] = ()  # settings of the backend, key=value
    # any: measurements may change the settings; without a GPU plain torch computes. served: the engine of a server with
    # these settings. stock: SGLang's own attention
    engine: Literal["any", "served", "stock"] = "any"
    tokens: int = 8192  # capacity of the KV pool
    rows: int = 8  # maximum number of rows that decode together
    device: str | None = None  # None: CUDA if there is a GPU
    has_tokenizer: bool = True
    cuda_graphs: bool = True  # ignored without a GPU

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Load:
        return cls(**{**fields, "settings": tuple(fields["settings"])})


def flags_of(load: Load, bytes_per_token: int, *, on_gpu: bool) -> list[str]:
    """Return SGLang's command line flags for ``load``. ``bytes_per_token`` is for a KV cache in 32 bits."""
    flags = [
        f"--model-path={load.model}", "--dtype=auto", "--log-level=error", "--cuda-graph-backend-prefill=disabled",
        f"--max-running-requests={max(2, load.rows)}", "--random-seed=1",
        *([f"--device={load.device}"] if load.device else [] if on_gpu else ["--device=cpu"]),
        *([] if load.has_tokenizer else ["--skip-tokenizer-init"]),
    ]  # fmt: skip
    by_graphs = on_gpu and load.cuda_graphs
    if by_graphs:
        # nothing is sampled, so no sampler is compiled; few graphs, because every change of settings records them again
        flags += ["--sampling-backend=pytorch", "--cuda-graph-bs-decode", *map(str, _batch_sizes(load.rows))]
    else:
        flags.append("--disable-cuda-graph")
    if load.engine == "stock":
        # on a CPU host, stock SGLang would take all memory for its pool
        return [*flags, *([] if on_gpu else ["--attention-backend=torch_native", f"--max-total-tokens={load.tokens}"])]
    memory = int(_SPARE * load.tokens * bytes_per_token) // _MIB + 512  # buffers of layers end on boundaries of 2 MiB
    settings = [f"host_memory={memory}MiB", *([] if by_graphs else ["worker=none"]), *load.settings]
    if load.engine == "served" and not on_gpu:
        settings.remove("worker=none")  # a server without a GPU has this by default
    return [*flags, "--attention-backend=hybrid", *(f"--hybrid={setting}" for setting in settings)]


def _batch_sizes(rows: int) -> list[int]:
    return sorted({1, 2, 4, 8, 16, 32, rows} & set(range(1, rows + 1)))


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Return the bytes of one token in a 32-bit KV cache. ``config`` is the model's config.json."""
    text = config.get("text_config") or config
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return int(text["num_hidden_layers"] * text.get("num_key_value_heads", heads) * 2 * head_dim * _ITEMSIZE)
