"""What a session process loads, and SGLang's command line for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

# float32 on a CPU: the pool must hold the tokens in the larger of the two
_ITEMSIZE = 4
_SPARE = 1.1
_MIB = 1 << 20


@dataclass(frozen=True)
class Load:
    """One model with one pool."""

    model: str  # its directory
    settings: tuple[str, ...] = ()  # of the backend, key=value
    # any: settings change as measurements ask, in plain torch without a GPU. served: the engine of a server with these
    # settings. stock: SGLang's own attention
    engine: Literal["any", "served", "stock"] = "any"
    tokens: int = 8192  # that the pool holds
    rows: int = 8  # that decode together, at most
    device: str | None = None  # None: CUDA where there is one
    has_tokenizer: bool = True
    cuda_graphs: bool = True  # where there is a GPU

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Load:
        return cls(**{**fields, "settings": tuple(fields["settings"])})


def flags_of(load: Load, bytes_per_token: int, *, on_gpu: bool) -> list[str]:
    """SGLang's command line. ``bytes_per_token``: of the KV cache in 32 bits."""
    flags = [
        f"--model-path={load.model}", "--dtype=auto", "--log-level=error", "--cuda-graph-backend-prefill=disabled",
        f"--max-running-requests={max(2, load.rows)}", "--random-seed=1",
        *([f"--device={load.device}"] if load.device else [] if on_gpu else ["--device=cpu"]),
        *([] if load.has_tokenizer else ["--skip-tokenizer-init"]),
    ]  # fmt: skip
    by_graphs = on_gpu and load.cuda_graphs
    if by_graphs:
        # nothing is sampled, so that no sampler is compiled; few graphs, they are recorded anew with other settings
        flags += ["--sampling-backend=pytorch", "--cuda-graph-bs-decode", *map(str, _batch_sizes(load.rows))]
    else:
        flags.append("--disable-cuda-graph")
    if load.engine == "stock":
        # stock would take all of a host's memory for its pool
        return [*flags, *([] if on_gpu else ["--attention-backend=torch_native", f"--max-total-tokens={load.tokens}"])]
    memory = int(_SPARE * load.tokens * bytes_per_token) // _MIB + 512  # buffers of layers end on boundaries of 2 MiB
    settings = [f"host_memory={memory}MiB", *([] if by_graphs else ["worker=none"]), *load.settings]
    if load.engine == "served" and not on_gpu:
        settings.remove("worker=none")  # which a server without a GPU has by default
    return [*flags, "--attention-backend=hybrid", *(f"--hybrid={setting}" for setting in settings)]


def _batch_sizes(rows: int) -> list[int]:
    return sorted({1, 2, 4, 8, 16, 32, rows} & set(range(1, rows + 1)))


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Of a model's config.json, in 32 bits."""
    text = config.get("text_config") or config
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return int(text["num_hidden_layers"] * text.get("num_key_value_heads", heads) * 2 * head_dim * _ITEMSIZE)
