"""Layers made by hand, of the structure that the predictor reads and of others, which it refuses with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers


class Norm(torch.nn.Module):
    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))


Norm.__name__ = "RMSNorm"  # the class name of the norm in SGLang's layers


class Rotary(torch.nn.Module):
    is_neox_style = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.zeros(16, 4))


class RadixAttention(torch.nn.Module):
    layer_id, scaling = 5, 0.25


class Attention(torch.nn.Module):
    q_size, head_dim = 8, 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Linear(8, 16)
        self.o_proj = torch.nn.Linear(8, 6)
        self.rotary_emb: torch.nn.Module = Rotary()
        self.attn = RadixAttention()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm: torch.nn.Module = Norm()
        self.self_attn = Attention()


def refusal(layer: Layer) -> str:
    with pytest.raises(UnknownLayers) as caught:
        DecoderLayers(torch.nn.ModuleList([layer])).query_weights(5)
    return str(caught.value)


def test_a_layer_of_the_known_structure_is_read_whatever_its_model_is_called() -> None:
    layers = DecoderLayers(torch.nn.Sequential(torch.nn.Linear(2, 2), Layer()))
    assert layers.ids == [5]
    weights = layers.query_weights(5)
    assert weights.projection.shape == (8, 8)
    assert weights.bias is not None
    assert weights.bias.shape == (8,)
    assert weights.head_norm is None
    assert layers.scale(5, torch.bfloat16) == 0.25
    assert layers.output_projection(5).shape == (6, 8)


class Stream:
    """Stand-in for SGLang's stream of residuals: ``hidden`` is a tensor, or a name for a pending sum."""

    def __init__(self, residual: torch.Tensor | None, pending: torch.Tensor | None) -> None:
        self.residual, self.pending = residual, pending

    def complete(self, hidden: Any) -> Any:
        return hidden if self.pending is None else self.pending


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("owed", [False, True])
def test_a_residual_that_the_batch_carries_is_part_of_the_input(owed: bool, by_name: bool) -> None:
    output, residual, positions = torch.ones(2, 8), torch.full((2, 8), 2.0), torch.arange(2)
    given: Any = "owed" if owed else output
    batch = SimpleNamespace(residual_stream=Stream(residual, output))
    got: list[Any] = []

    class Asked(Layer):
        def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, capture_output: Any = None) -> Any:
            return hidden_states

    layer = Asked()
    DecoderLayers(torch.nn.Sequential(layer)).on_input(lambda *inputs: got.append(inputs))
    arguments = (positions,) if by_name else (positions, given, batch)
    named = {"hidden_states": given, "forward_batch": batch} if by_name else {}
    assert layer(*arguments, capture_output=None, **named) is output
    batch.residual_stream = Stream(residual, None)  # nothing is pending: hidden states are the whole input
    layer(positions, residual, batch)
    assert [inputs[0] for inputs in got] == [5, 5]
    assert torch.equal(got[0][1], output + residual)
    assert torch.equal(got[1][1], residual)


def test_an_output_projection_that_is_no_plain_matrix_is_refused() -> None:
    packed, absent = Layer(), Layer()
    packed.self_attn.o_proj.weight = torch.nn.Parameter(torch.zeros(6, 1, dtype=torch.int32), requires_grad=False)
    del absent.self_attn.o_proj
    for layer in (packed, absent):
        with pytest.raises(UnknownLayers, match=r"layer 5's o_proj is quantised or packed"):
            DecoderLayers(torch.nn.ModuleList([layer])).output_projection(5)


def test_a_model_without_such_layers_is_refused_by_its_name() -> None:
    class SomeModel(torch.nn.Module):
        pass

    with pytest.raises(UnknownLayers, match=r"SomeModel has no decoder layers with self_attn\.attn and"):
        DecoderLayers(SomeModel())


def test_a_projection_that_is_no_plain_matrix_is_refused_with_the_layer() -> None:
    packed, missing, transposed, eight_bits = Layer(), Layer(), Layer(), Layer()
    packed.self_attn.qkv_proj.weight = torch.nn.Parameter(torch.zeros(16, 8, dtype=torch.int8), requires_grad=False)
    del missing.self_attn.qkv_proj.weight
    transposed.self_attn.qkv_proj.weight = torch.nn.Parameter(torch.zeros(8, 16))
    # FP8 is a floating-point dtype but no plain matrix, because its scales are elsewhere: a matmul would fail
    weight = torch.zeros(16, 8).to(torch.float8_e4m3fn)
    eight_bits.self_attn.qkv_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    for layer in (packed, missing, transposed, eight_bits):
        assert refusal(layer) == "layer 5's qkv_proj is quantised or packed, not a plain matrix"


class EightBits(torch.nn.Module):
    """A linear layer as in a quantised model: 8-bit weights, a scale for each output, and a bias."""

    def __init__(self, weight: torch.Tensor, input_scale: float | None = None) -> None:
        super().__init__()
        self.scales = weight.abs().amax(dim=1, keepdim=True) / 448
        # transposed, as quantised kernels store it
        self.weight = torch.nn.Parameter((weight / self.scales).to(torch.float8_e4m3fn).T, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(weight.shape[0]))
        self.input_scale = None if input_scale is None else torch.tensor(input_scale)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.input_scale is not None:
            given = (given / self.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * self.input_scale
        return given @ (self.weight.T.float() * self.scales).T + self.bias, None


@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_quantised_weights_are_read_by_what_the_layer_makes_of_the_identity(input_scale: float | None) -> None:
    layer, weight = Layer(), torch.randn(16, 8)
    layer.self_attn.qkv_proj = EightBits(weight, input_scale)  # type: ignore[assignment]
    layers = DecoderLayers(torch.nn.ModuleList([layer]))
    found = layers.query_weights(5)
    assert torch.allclose(found.projection, weight[:8], rtol=0.07, atol=0.01)
    assert found.bias is not None
    assert torch.equal(found.bias, layer.self_attn.qkv_proj.bias[:8])


def test_another_norm_or_another_rotation_is_refused_with_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    other_norm, other_rotary, none = Layer(), Layer(), Layer()
    other_norm.input_layernorm = torch.nn.LayerNorm(8)
    monkeypatch.setattr(other_rotary.self_attn.rotary_emb, "mrope_section", [1, 1, 2], raising=False)
    none.self_attn.rotary_emb = torch.nn.Identity()
    assert refusal(other_norm) == "layer 5's input_layernorm is a LayerNorm"
    assert refusal(other_rotary) == "layer 5's rotary embedding is a Rotary"
    assert refusal(none) == "layer 5's rotary embedding is a Identity"
