"""Write a model of Qwen3's shape whose attention drifts like a real model's, to measure throughput without a download.

    python -m bench.synthetic_model DIR [--layers 10] [--drift 0.08] [--seed 0]    write a Hugging Face directory
    python -m bench.synthetic_model --check [--full]                               check a small model, or this one

Random weights are no substitute: their queries are new at every token and their attention is nearly uniform, so the
selection of blocks would change completely at every step. In this model the residual stream has two halves:

    asking half   holds a direction that all tokens share, plus `drift` times a vector of the token. Queries and the MLP
                  read this half. Attention and the MLP write it, a little in each layer. So queries change slowly from
                  token to token (drift) and from layer to layer (the part that a raw prediction misses).
    told half     holds the token itself, as a member of a topic. Keys and values read this half, and no layer writes
                  it. Queries are long enough (`sharpness`) that a sixteenth of the blocks gets most of the attention.
                  Rotation of some channels makes attention wander off these blocks over the steps (`turning`).

The output matrix makes the next token a fixed function of the last one (`next_token`): greedy decoding walks through
the vocabulary in the same way with every attention backend. There is no tokenizer; serve with --skip-tokenizer-init.
The vocabulary has 32,768 tokens instead of Qwen3's 151,936: the model is written faster, and steps are shorter with
every backend.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

# the next token is (STRIDE * token + 1) modulo the vocabulary's size, a power of two: a walk through all of it
STRIDE = 20_077  # 1 modulo 4: the walk visits every token
ROPE_THETA = 1e6
SILU_GATED_SQUARE = 0.3558  # mean of (silu(a) b)^2 for independent standard normal a, b
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG_KEY = "sglang_hybrid_synthetic"


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model. The defaults are those of Qwen3-14B, except for the layers and the vocabulary."""

    layers: int = 10
    hidden: int = 5120
    heads: int = 40
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 17408
    vocabulary: int = 32768
    positions: int = 131072

    def __post_init__(self) -> None:
        if self.vocabulary & (self.vocabulary - 1):
            raise ValueError(f"vocabulary must be a power of two, not {self.vocabulary}")

    @property
    def half(self) -> int:
        return self.hidden // 2


# Qwen3-8B with all its layers; its real vocabulary is 151,936
QWEN3_8B = Shape(
    layers=36, hidden=4096, heads=32, intermediate=12288, vocabulary=131072, positions=(1 << 18) + (1 << 14)
)
SMALL = Shape(layers=4, hidden=512, heads=10, kv_heads=2, intermediate=1024, vocabulary=4096, positions=40960)
TINY = Shape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocabulary=1024, positions=4096)


@dataclass(frozen=True)
class Character:
    """Properties of the attention, tuned with ``--check``. Lengths are relative: 1 is the rest of the same half."""

    drift: float = 0.08  # length of a token's own vector in the asking half
    mlp_change: float = 0.3  # length that the MLP of one layer adds to the asking half
    attention_change: float = 0.06  # the same for attention, if its output were 0.3 long
    sharpness: float = 6.5  # standard deviation of attention logits
    turning: float = 0.25  # share of the logits' variance in channels that rotation turns in some hundred steps
    scattered: float = 0.03  # the same in channels that sketches do not see
    group_share: float = 0.85  # share of a query's squared length that all query heads of a KV head have in common
    topics: int = 64
    topic_share: float = 0.75  # share of the told half's squared length that comes from the topic


def next_token(token: int, vocabulary: int) -> int:
    return (STRIDE * token + 1) % vocabulary


def topic_tokens(topic: int, shape: Shape, character: Character) -> range:
    size = shape.vocabulary // character.topics
    return range(topic * size, (topic + 1) * size)


def prompt(length: int, shape: Shape, character: Character, seed: int) -> list[int]:
    """Return ``length`` token ids in runs of 8 to 96 tokens; the tokens of a run have one topic."""
    generator = torch.Generator().manual_seed(seed)
    size = shape.vocabulary // character.topics
    runs = torch.randint(8, 97, (length // 8 + 1,), generator=generator)
    topic = torch.randint(0, character.topics, runs.shape, generator=generator).repeat_interleave(runs)[:length]
    return (topic * size + torch.randint(0, size, (length,), generator=generator)).tolist()


# -- weights -----------------------------------------------------------------------------------------------------------


class Maker:
    """Maker of the model's tensors: random numbers from one seed, generated on ``device``."""

    def __init__(self, shape: Shape, character: Character, seed: int, device: str, dtype: torch.dtype) -> None:
        self.shape, self.character = shape, character
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device, self._dtype = device, dtype

    def _normal(self, *size: int, std: float = 1.0) -> torch.Tensor:
        values = torch.empty(size, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, std, generator=self._generator)

    def _reading(self, outputs: int, told: bool) -> torch.Tensor:
        """Return a random matrix ``[outputs, hidden]`` that reads one half (told or asking) and ignores the other."""
        half = self.shape.half
        matrix = torch.zeros(outputs, self.shape.hidden, dtype=self._dtype, device=self._device)
        matrix[:, half if told else 0 :][:, :half] = self._normal(outputs, half, std=half**-0.5)
        return matrix

    def _writing(self, inputs: int, rms: float) -> torch.Tensor:
        """Return a random matrix ``[hidden, inputs]`` that writes the asking half only.

        Inputs with a root mean square of 1 give ``rms`` in each channel.
        """
        half = self.shape.half
        matrix = torch.zeros(self.shape.hidden, inputs, dtype=self._dtype, device=self._device)
        matrix[:half] = self._normal(half, inputs, std=rms * inputs**-0.5)
        return matrix

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def embeddings(self) -> tuple[Tensors, Tensors]:
        """Return the tensors of the input and of the output. Both halves of embeddings have a root mean square of 1."""
        shape, character = self.shape, self.character
        token = torch.arange(shape.vocabulary, device=self._device)
        asking = self._normal(1, shape.half) + self._normal(shape.vocabulary, shape.half, std=character.drift)
        topics = self._normal(character.topics, shape.half, std=character.topic_share**0.5)
        told = topics[token // (shape.vocabulary // character.topics)]
        told = told + self._normal(shape.vocabulary, shape.half, std=(1 - character.topic_share) ** 0.5)
        head = torch.zeros(shape.vocabulary, shape.hidden, dtype=self._dtype, device=self._device)
        # 40: logits far enough apart for bfloat16
        head[(token * STRIDE + 1) % shape.vocabulary, shape.half :] = told * (40 / shape.half)
        return (
            {"model.embed_tokens.weight": torch.cat((asking, told), dim=1)},
            {"lm_head.weight": head, "model.norm.weight": self._ones(shape.hidden)},
        )

    def layer(self, index: int) -> Tensors:
        shape, character = self.shape, self.character
        per_layer = character.mlp_change**2 + character.attention_change**2
        grown = (1 + per_layer) ** (index / 2)  # root mean square of the asking half so far
        name = f"model.layers.{index}"
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return {
            f"{name}.input_layernorm.weight": self._ones(shape.hidden),
            f"{name}.post_attention_layernorm.weight": self._ones(shape.hidden),
            f"{name}.self_attn.q_proj.weight": self._queries(),
            f"{name}.self_attn.k_proj.weight": self._reading(keys, told=True),
            f"{name}.self_attn.v_proj.weight": self._reading(keys, told=True),
            f"{name}.self_attn.o_proj.weight": self._writing(queries, grown * character.attention_change / 0.3),
            f"{name}.self_attn.q_norm.weight": self._query_gain(),
            f"{name}.self_attn.k_norm.weight": self._ones(shape.head_dim),
            f"{name}.mlp.gate_proj.weight": self._reading(shape.intermediate, told=False),
            f"{name}.mlp.up_proj.weight": self._reading(shape.intermediate, told=False),
            f"{name}.mlp.down_proj.weight": self._writing(
                shape.intermediate, grown * character.mlp_change * SILU_GATED_SQUARE**-0.5
            ),
        }

    def _queries(self) -> torch.Tensor:
        shape, common = self.shape, self.character.group_share
        own = self._reading(shape.heads * shape.head_dim, told=False)
        group = self._reading(shape.kv_heads * shape.head_dim, told=False).unflatten(0, (shape.kv_heads, -1))
        groups = group.repeat_interleave(shape.heads // shape.kv_heads, dim=0).flatten(0, 1)
        return own.mul_((1 - common) ** 0.5).add_(groups, alpha=common**0.5)

    def _query_gain(self) -> torch.Tensor:
        """Return the query norm's weight ``[head_dim]``. A quarter of the channels gets most of it, as sketches need.

        Rotation turns channels c and c + head_dim / 2 as a pair; the higher c, the slower. The slowest pairs tell
        topics apart at any distance. The turning pairs make a selection leave its blocks little by little, which
        recalls follow; drift alone would change the selection to and fro.
        """
        pairs, character = self.shape.head_dim // 2, self.character
        place = torch.arange(pairs) / pairs
        slow, turning = place >= 13 / 16, (place >= 9 / 32) & (place < 11 / 32)
        share = torch.full((pairs,), character.scattered / int((~(slow | turning)).sum()))
        share[turning] = character.turning / int(turning.sum())
        share[slow] = (1 - character.turning - character.scattered) / int(slow.sum())
        gain = character.sharpness * (share * pairs).sqrt()
        return gain.repeat(2).to(self._device, self._dtype)


def parts(shape: Shape, character: Character, seed: int, device: str, dtype: torch.dtype) -> Iterator[Tensors]:
    """Yield the tensors of the model, those of one file at a time."""
    maker = Maker(shape, character, seed, device, dtype)
    first, last = maker.embeddings()
    yield first
    for index in range(shape.layers):
        yield maker.layer(index)
    yield last


def config(shape: Shape, character: Character, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},  # newer versions read this
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        CONFIG_KEY: {"shape": asdict(shape), "character": asdict(character)},
    }


def write_model(
    target: Path, shape: Shape, character: Character, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a Hugging Face directory to ``target``. Once config.json is there, the directory is complete."""
    target.mkdir(parents=True, exist_ok=True)
    files = shape.layers + 2
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(parts(shape, character, seed, DEVICE, dtype), start=1):
        name = f"model-{number:05d}-of-{files:05d}.safetensors"
        save_file({key: value.cpu() for key, value in tensors.items()}, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(value.numel() * value.itemsize for value in tensors.values())
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # this process may live on beside a server that needs the memory
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (target / "config.json").write_text(json.dumps(config(shape, character, dtype), indent=1))


def read_model(target: Path) -> tuple[Shape, Character] | None:
    """Return what the synthetic model in ``target`` was made with; None for any other model."""
    made_with = json.loads((target / "config.json").read_text()).get(CONFIG_KEY)
    return made_with and (Shape(**made_with["shape"]), Character(**made_with["character"]))


def ensure_model(target: Path, shape: Shape, character: Character, seed: int = 0) -> Path:
    if not (target / "config.json").is_file() or read_model(target) != (shape, character):
        write_model(target, shape, character, seed)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?", help="directory to write")
    parser.add_argument("--check", action="store_true", help="measure a small one instead of writing")
    parser.add_argument("--full", action="store_true", help="check the model that would be written; wants a GPU")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--vocabulary", type=int, default=Shape.vocabulary, help="a power of two")
    parser.add_argument("--drift", type=float, default=Character.drift)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192, help="prompt of --check")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of --check")
    args = parser.parse_args()
    character = Character(drift=args.drift)
    full = replace(Shape(), layers=args.layers, vocabulary=args.vocabulary)
    if args.check:
        from bench.side_by_side.synthetic_check import check

        shape = full if args.full else SMALL
        print(json.dumps(check(shape, character, args.seed, args.tokens, args.steps, DEVICE), indent=1))
        return
    if args.target is None:
        parser.error("a directory to write, or --check")
    start = time.monotonic()
    write_model(args.target, full, character, args.seed)
    print(f"{args.target} written in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
