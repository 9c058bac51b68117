"""Measures a synthetic model's attention in plain torch: prefill a prompt, decode, select blocks at every step."""

from __future__ import annotations

from typing import Any

import torch

from bench.synthetic_model import ROPE_THETA, Character, Shape, next_token, parts, prompt
from sglang_hybrid.memory.sketches import channel_order
from sglang_hybrid.ops import reference

TOKENS, SINK, RECENT, CHANNELS = 32, 1, 2, 32
BUDGET_SHARE = 16  # a sixteenth of the blocks, as 64 of 1,024
EPS = 1e-6
LAGS = (1, 8, 32)


class PlainModel:
    """Qwen3 in plain torch: exact attention, float32, one row."""

    def __init__(self, shape: Shape, character: Character, seed: int, device: str) -> None:
        self.shape, self.device = shape, device
        self._weights: dict[str, torch.Tensor] = {}
        for part in parts(shape, character, seed, device, torch.float32):
            self._weights |= part
        frequencies = ROPE_THETA ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.positions)[:, None] * frequencies
        self._rotary = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def weight(self, layer: int, name: str) -> torch.Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def query(self, layer: int, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the query of ``layer`` for any inputs. Inputs of the layer before give the raw prediction."""
        normed = reference.rms_unit(inputs, EPS) * self.weight(layer, "input_layernorm")
        return self._heads(normed, layer, "q", positions)

    def keys(self, layer: int) -> torch.Tensor:
        """Return all keys of a layer so far: ``[H, n, D]``."""
        return self._cache[layer][0]

    def forward(self, tokens: list[int]) -> tuple[list[torch.Tensor], int]:
        """Run ``tokens``, append them to the KV cache, and return the inputs of every layer and the next token."""
        past = self._cache[0][0].shape[1] if self._cache else 0
        positions = torch.arange(past, past + len(tokens), device=self.device)
        x = self._weights["model.embed_tokens.weight"][tokens]
        inputs = []
        for layer in range(self.shape.layers):
            inputs.append(x)
            x = x + self._attention(layer, x, positions)
            normed = reference.rms_unit(x, EPS) * self.weight(layer, "post_attention_layernorm")
            gate, up = (normed @ self.weight(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.weight(layer, "mlp.down_proj").T
        last = reference.rms_unit(x[-1], EPS) * self._weights["model.norm.weight"]
        return inputs, int((self._weights["lm_head.weight"] @ last).argmax())

    def _heads(self, normed: torch.Tensor, layer: int, kind: str, positions: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = (normed @ self.weight(layer, f"self_attn.{kind}_proj").T).unflatten(
            -1, (-1, self.shape.head_dim)
        )
        if kind == "v":
            return heads
        heads = reference.rms_unit(heads, EPS) * self.weight(layer, f"self_attn.{kind}_norm")
        return reference.rotate(heads, self._rotary[positions], neox=True)

    def _attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = reference.rms_unit(x, EPS) * self.weight(layer, "input_layernorm")
        query, key, value = (self._heads(normed, layer, kind, positions) for kind in "qkv")
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        if layer < len(self._cache):
            kept = self._cache[layer]
            key, value = torch.cat((kept[0], key), dim=1), torch.cat((kept[1], value), dim=1)
            self._cache[layer] = (key, value)
        else:
            self._cache.append((key, value))
        out = reference.attend_prefill(query, key, value, self.shape.head_dim**-0.5)
        return out.flatten(1) @ self.weight(layer, "self_attn.o_proj").T


class Selection:
    """Selects blocks of one layer by digests and sketches, like policy scout without a resident bonus."""

    def __init__(self, model: PlainModel, layer: int) -> None:
        shape = model.shape
        self._model, self._layer = model, layer
        gain = model.weight(layer, "self_attn.q_norm").expand(shape.kv_heads, -1)
        self._channels = channel_order(gain, shape.head_dim, True)[:, :CHANNELS].contiguous()
        self._scale = shape.head_dim**-0.5

    def of(self, query: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return a mask ``[H, blocks]`` of selected full blocks, and the share of the real attention that they get."""
        keys = self._model.keys(self._layer)
        heads, tokens, dim = keys.shape
        blocks = tokens // TOKENS
        pages = keys[:, : blocks * TOKENS].unflatten(1, (blocks, TOKENS)).transpose(0, 1).contiguous()
        digests = reference.minmax_digest(pages, torch.full((blocks,), TOKENS, device=keys.device))
        codes = reference.sketch_codes(pages, digests, self._channels)
        logits = reference.sketch_logits(query, digests[None], codes[None], self._channels, self._scale)
        counts = torch.tensor([blocks], device=keys.device)
        scores = reference.block_scores(logits, counts, self._scale)
        chosen = reference.select_blocks(scores, counts, blocks // BUDGET_SHARE, SINK, RECENT)
        listed = reference.is_listed(chosen, blocks)[0]
        attention = torch.einsum("hgd,nhtd->hgnt", query[0].view(heads, -1, dim), pages) * self._scale
        share = attention.flatten(2).softmax(dim=2).unflatten(2, (blocks, TOKENS)).sum(dim=3)
        return listed, float((share * listed[:, None]).sum(dim=2).mean())


def check(
    shape: Shape, character: Character, seed: int, tokens: int, steps: int, device: str = "cpu"
) -> dict[str, Any]:
    """Decode ``steps`` tokens behind a prompt and return figures: means over layers, KV heads and steps."""
    model = PlainModel(shape, character, seed, device)
    _, token = model.forward(prompt(tokens, shape, character, seed + 1))
    walked = 0
    history: list[list[torch.Tensor]] = []
    cosines: list[list[float]] = []
    shares: list[float] = []
    selections = [Selection(model, layer) for layer in range(shape.layers)]
    for _ in range(steps):
        before, position = token, torch.tensor([model.keys(0).shape[1]], device=device)
        inputs, token = model.forward([before])
        walked += token == next_token(before, shape.vocabulary)
        listed = []
        for layer, selection in enumerate(selections):
            chosen, share = selection.of(model.query(layer, inputs[layer], position))
            listed.append(chosen)
            shares.append(share)
        history.append(listed)
        cosines.append(
            [
                float(
                    torch.nn.functional.cosine_similarity(
                        model.query(layer, inputs[layer], position),
                        model.query(layer, inputs[layer - 1], position),
                        dim=-1,
                    ).mean()
                )
                for layer in range(1, shape.layers)
            ]
        )
    by_layer = torch.tensor(cosines).mean(dim=0)
    return {
        "character": vars(character),
        "blocks": tokens // TOKENS,
        "budget_blocks": tokens // TOKENS // BUDGET_SHARE,
        "block_change_in_steps": {lag: round(changed(history, lag), 3) for lag in LAGS if lag < steps},
        "attention_in_selection": round(sum(shares) / len(shares), 3),
        "raw_prediction_cosine": round(float(by_layer.mean()), 3),
        "raw_prediction_cosine_of_layers": [round(float(value), 3) for value in by_layer],
        "steps_on_the_walk": f"{walked} of {steps}",
    }


def changed(history: list[list[torch.Tensor]], lag: int) -> float:
    """Return the mean share of a selection that was not in the selection ``lag`` steps before."""
    shares = []
    for now, then in zip(history[lag:], history, strict=False):
        for after, before in zip(now, then, strict=True):
            blocks = min(after.shape[1], before.shape[1])
            new = (after[:, :blocks] & ~before[:, :blocks]).sum() + after[:, blocks:].sum()
            shares.append(float(new / after.sum()))
    return sum(shares) / len(shares) if shares else float("nan")
