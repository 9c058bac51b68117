"""Numbers that the papers report, each with the table, figure or section that contains it.

Only numbers that a paper prints are listed. Values that could only be read off a plot are left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    setup: str  # models and machines behind the paper's numbers


SCOUTATTENTION = Paper(
    "ScoutAttention",
    "ScoutAttention: GPU-CPU collaborative attention with layer-ahead CPU pre-computation (arXiv 2603.27138)",
    "Qwen3-8B (accuracy) and Qwen3-14B (speed), a GPU of 80 GB, a CPU of 36 cores, budget 2,048, blocks of 32",
)
HGCA = Paper(
    "HGCA",
    "HGCA: hybrid GPU-CPU attention for long-context inference",
    "OPT, Llama, Vicuna and GPT-NeoX on A6000 GPUs of 48 GB, two Xeon Gold 6430; WikiText",
)
HCATTENTION = Paper(
    "HCAttention",
    "HCAttention: heterogeneous approximate attention for KV cache compression",
    "Llama-2-7B-32K and Llama-3-8B-1048k on A100 GPUs of 80 GB; LongBench and needle in a haystack",
)


@dataclass(frozen=True)
class Source:
    """The table, figure or section of a paper that contains a number."""

    paper: Paper
    place: str

    def __str__(self) -> str:
        return f"{self.paper.name}, {self.place}"


@dataclass(frozen=True)
class Number:
    value: float
    source: Source


def _scout(value: float, place: str) -> Number:
    return Number(value, Source(SCOUTATTENTION, place))


# -- ScoutAttention ----------------------------------------------------------------------------------------------------

SCOUT_RATIO_MEAN = _scout(0.082, "section 3.4 and figure 6b")  # CPU compute ratio with recall
SCOUT_RATIO_THRESHOLD = _scout(0.12, "section 3.4")  # beta
SCOUT_RECALL_INTERVAL = _scout(8.7, "section 3.4")  # steps, mean over layers
SCOUT_ACCURACY_LOSS = {  # loss of LongBench's mean against full attention, by budget in tokens
    1024: _scout(0.025, "section 4.2 and figure 7"),
    2048: _scout(0.021, "section 4.2 and figure 7"),
}
SCOUT_SPEED_UP_64K = _scout(5.1, "section 4.3 and figure 8")  # over FullKV at 64k tokens
SCOUT_SPEED_UP_OTHERS = _scout(2.1, "section 4.3 and figure 8")  # at most, over HGCA and InfiniGen
SCOUT_BATCH_SCALING = {  # throughput over the throughput of the smaller batch, 32k tokens: (from, to) -> policy
    (16, 32): {
        "scoutattention": _scout(1.78, "section 4.3 and figure 9"),
        "hgca": _scout(1.31, "section 4.3 and figure 9"),
        "infinigen": _scout(1.21, "section 4.3 and figure 9"),
    },
    (32, 64): {"scoutattention": _scout(1.48, "section 4.3 and figure 9")},
}
SCOUT_BATCHES = (16, 32, 40, 64)
SCOUT_BLOCK_TOKENS = _scout(32, "section 4.3")
SCOUT_IDLE = {  # share of a step in which the GPU waits for the CPU or for PCIe, batch 40
    "hgca": _scout(0.57, "section 4.3 and figure 11"),
    "infinigen": _scout(0.61, "section 4.3 and figure 11"),
    "scoutattention": _scout(0.06, "section 4.3 and figure 11"),
}
SCOUT_ABLATION = {  # factor by which each part raises throughput
    "pre-computation": _scout(1.39, "section 4.3 and figure 12"),
    "periodic recall": _scout(1.20, "section 4.3 and figure 12"),
}
SCOUT_COSINES = {  # cosines of predicted and real queries
    "Qwen3-8B": _scout(0.94, "table 1"),
    "Gemma-3-12B": _scout(0.93, "table 1"),
    "Llama-3.1-8B": _scout(0.96, "table 1"),
    "Mistral-7B": _scout(0.97, "table 1"),
    "GLM-4-9B": _scout(0.94, "table 1"),
}

# -- HGCA --------------------------------------------------------------------------------------------------------------

HGCA_PERPLEXITY_SOURCE = Source(HGCA, "table 1")
HGCA_BETAS = (0.25, 0.5, 0.75, 1.0)
HGCA_RATIOS = (0.25, 0.5, 0.75)  # share of the KV cache that the GPU holds
# model -> perplexity of full attention, and perplexities [ratio][beta]
HGCA_PERPLEXITY: dict[str, tuple[float, tuple[tuple[float, ...], ...]]] = {
    "OPT-6.7B": (19.12, ((19.42, 19.17, 19.02, 19.12), (19.17, 19.12, 19.09, 19.09), (19.12, 19.17, 19.17, 19.20))),
    "OPT-13B": (17.69, ((17.97, 18.05, 18.08, 17.94), (17.77, 17.80, 17.80, 17.83), (17.69, 17.69, 17.69, 17.72))),
    "OPT-30B": (16.78, ((19.97, 19.92, 19.78, 19.70), (16.91, 16.78, 16.78, 16.75), (18.33, 27.83, 19.42, 18.47))),
    "LLaMA-2-7B": (124.4, ((112.1, 115.9, 106.3, 105.4), (105.3, 100.8, 93.28, 99.81), (124.6, 124.9, 125.6, 125.5))),
    "LLaMA-2-13B": (227.2, ((288.7, 308.9, 310.2, 307.2), (293.8, 308.8, 330.9, 341.1), (226.2, 225.7, 225.6, 225.1))),
    "Vicuna-33B": (889.1, ((993.5, 1013, 941.5, 983.5), (896.2, 985.4, 894.9, 893.8), (1013, 1033, 1130, 1013))),
    "GPT-NeoX-12B": (66.88, ((51.38, 51.19, 51.19, 51.09), (54.59, 52.81, 51.91, 51.59), (65.88, 65.38, 64.81, 64.56))),
}  # fmt: skip
HGCA_RATE_END = (3.0, 4.0)  # tokens per second towards the end of 16,384 tokens, GPT-NeoX-12B, batch 1
HGCA_RATE_TOKENS = 16384
HGCA_RATE_WINDOW = 4096  # tokens on the GPU; beta 1
HGCA_RATE_SOURCE = Source(HGCA, "section 5.4 and figure 15")

# -- HCAttention -------------------------------------------------------------------------------------------------------

HC_TAU_SOURCE = Source(HCATTENTION, "table 3")
HC_TAU: dict[float, tuple[float, float]] = {  # tau -> share of tokens selected, LongBench mean; Llama-2-7B-32K
    0.3: (0.019, 40.2), 0.5: (0.032, 41.2), 0.7: (0.060, 43.9), 0.9: (0.156, 47.2), 1.0: (1.0, 46.9),
}  # fmt: skip
HC_CENTROIDS_SOURCE = Source(HCATTENTION, "table 4a")
HC_CENTROIDS: dict[int, float] = {256: 23.8, 1024: 36.4, 2048: 41.4, 4096: 42.2, 8192: 43.5}  # LongBench mean, g = 32
HC_GROUPS_SOURCE = Source(HCATTENTION, "table 4b")
HC_GROUPS: dict[int, float] = {16: 12.8, 32: 43.5, 64: 46.5}  # LongBench mean, 8,192 centroids
HC_FULL = 46.9  # LongBench mean of full attention in tables 3 and 4
HC_MEMORY_SOURCE = Source(HCATTENTION, "table 1a")
HC_MEMORY: dict[str, float] = {  # share of the KV cache that stays on the GPU
    "values offloaded": 0.5, "values offloaded, 64 groups": 0.25, "values offloaded, 32 groups": 0.125,
}  # fmt: skip
HC_LONGBENCH_SOURCE = Source(HCATTENTION, "table 2")
HC_LONGBENCH: dict[str, dict[str, float]] = {  # mean by share of the KV cache on the GPU
    "Llama-3-8B-1048k": {"100 %": 43.2, "50 %": 43.2, "25 %": 43.2, "12.5 %": 42.5},
    "Llama-2-7B-32K": {"100 %": 42.0, "50 %": 42.0, "25 %": 41.5, "12.5 %": 40.0},
}
HC_LONGEST_SOURCE = Source(HCATTENTION, "section 4.2")
HC_LONGEST_TOKENS = 4_000_000  # context of Llama-3-8B on one GPU of 80 GB
HC_LONGEST_GB = 80
