"""The predictor's formula gives the queries that real layers of tiny random models compute.

SGLang can be started once per process. So this file is also a program, which forks a process for each architecture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from sglang_hybrid.integration.decoder_layers import DecoderLayers
from sglang_hybrid.policies.scout.options import ScoutOptions

LAYERS, HIDDEN, VOCABULARY = 3, 64, 128
PROMPTS = [[(7 * i + 3) % VOCABULARY for i in range(200)], [(5 * i + 1) % VOCABULARY for i in range(71)]]
STEPS = 4  # decode steps after the prompts

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = {
    # scaled rotation as in Llama 3.1: its cosines differ from those of the plain formula
    "LlamaForCausalLM": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    # head_dim is not hidden / heads
    "MistralForCausalLM": {"model_type": "mistral", "rope_theta": 10000.0, "head_dim": 32, "sliding_window": None},
    # a bias on the projection
    "Qwen2ForCausalLM": {"model_type": "qwen2", "rope_theta": 1000000.0, "use_sliding_window": False},
    # a norm on every head
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "rope_theta": 1000000.0,
        "head_dim": 32,
        "use_sliding_window": False,
        "attention_bias": False,
    },
}


def write_model(directory: Path, architecture: str) -> None:
    config = COMMON | ARCHITECTURES[architecture] | {"architectures": [architecture]}
    (directory / "config.json").write_text(json.dumps(config))
    # any tokenizer will do: SGLang's loader reads one
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the reports of the program at the end of this file, by architecture."""
    directories = []
    for architecture in ARCHITECTURES:
        directories.append(tmp_path_factory.mktemp(architecture))
        write_model(directories[-1], architecture)
    command = [sys.executable, __file__, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(ARCHITECTURES, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def found(request: pytest.FixtureRequest, reports: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = reports[request.param]
    return report | {"architecture": request.param}


def test_the_predictor_on_a_layers_own_input_is_the_query_that_reaches_attention(found: dict[str, Any]) -> None:
    assert len(found["queries"]) == LAYERS * (1 + STEPS)
    for query in found["queries"]:
        assert query["spread"] > 0.1, "zeros would agree with anything"
        assert query["difference"] < 1e-5 * max(1.0, query["spread"]), query
    assert {query["mode"] for query in found["queries"]} == {"extend", "decode"}


def test_weights_are_read_as_each_architecture_has_them(found: dict[str, Any]) -> None:
    assert found["layers"] == list(range(LAYERS))
    assert found["has_bias"] == (found["architecture"] == "Qwen2ForCausalLM")
    assert found["has_head_norm"] == (found["architecture"] == "Qwen3ForCausalLM")
    assert found["scale"] == pytest.approx(found["head_dim"] ** -0.5)


def test_hooks_leave_the_models_output_as_it_is_bit_for_bit(found: dict[str, Any]) -> None:
    assert found["same_with_hooks"] == [True] * (1 + STEPS)
    assert found["same_without_hooks_again"] == [True] * (1 + STEPS)


def test_a_budget_that_holds_the_context_makes_prediction_invisible_bit_for_bit(found: dict[str, Any]) -> None:
    assert found["same_with_raw_prediction"] == [True] * STEPS

    assert found["same_with_calibrated_prediction"] == [True] * STEPS


def test_logits_are_computed_once_in_a_step_behind_its_last_layer(found: dict[str, Any]) -> None:
    assert found["logits"] == [["logits"]] * (1 + STEPS)


def test_every_layer_is_announced_in_order_and_in_decode_only(found: dict[str, Any]) -> None:
    # the first layer too, by its own input: the worker holds two posts, so posts must be in order
    assert found["announced"] == found["announced_calibrated"] == list(range(LAYERS)) * STEPS
    assert found["announced_without_prediction"] == []


def test_a_raw_announcement_is_the_next_layers_formula_and_a_calibrated_one_adds_the_correction(
    found: dict[str, Any],
) -> None:
    assert found["raw_difference"] < 1e-5
    assert found["calibrated_difference"] < 1e-5
    assert found["correction_changes"] > 0.1


def test_a_text_outside_any_request_has_the_inputs_of_its_prefill(found: dict[str, Any]) -> None:
    assert found["input_differences"] == [pytest.approx(0.0, abs=1e-4)] * LAYERS


def test_calibration_is_fitted_once_and_found_again(found: dict[str, Any]) -> None:
    raw, fitted = found["cosines"]
    assert fitted > raw + 0.01
    assert found["found_again"]
    assert found["channels_are_orders"] == [True] * LAYERS
    assert found["skews_are_orthogonal"] == [True] * LAYERS
    assert found["steps_cover_the_text"] == {str(layer): True for layer in range(LAYERS)}


def test_fitting_a_few_layers_at_a_time_gives_the_same(found: dict[str, Any]) -> None:
    assert found["group_difference"] < 1e-3


def test_decoding_behind_a_prompt_can_begin_again(found: dict[str, Any]) -> None:
    assert found["same_after_rewind"] == [True] * STEPS


def test_prefill_tells_its_progress_layer_by_layer(found: dict[str, Any]) -> None:
    assert found["parts_of_prefill"] == [pytest.approx(1 / LAYERS)] * LAYERS


def test_a_model_is_known_by_its_shape_and_its_norms(found: dict[str, Any]) -> None:
    identity = found["identity"]
    assert len(identity.pop("weights")) == 16
    assert identity == {
        "architecture": found["architecture"],
        "layers": LAYERS,
        "hidden": HIDDEN,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": found["head_dim"],
    }


# The program: reports on one architecture after the other


def main(directories: list[str]) -> None:
    """Report on each directory in a forked process, because importing SGLang again would take longest."""
    from sglang.benchmark import one_batch  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401

    from sglang_hybrid.integration import automatic_calibration, calibrate, model_session  # noqa: F401
    from sglang_hybrid.integration.activate import load_plugin

    load_plugin()
    torch.set_num_threads(1)
    for directory in directories:
        child = os.fork()
        if not child:
            report(directory)
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{directory} failed")


def report(directory: str) -> None:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.integration.model_session import ModelSession, Prefilled
    from sglang_hybrid.integration.predictor import identity
    from sglang_hybrid.policies.scout.predictor import Correction, QueryPredictor

    session = ModelSession([
        f"--model-path={directory}", "--load-format=dummy", "--attention-backend=hybrid", "--device=cpu",
        "--dtype=float32", "--log-level=error", "--max-running-requests=4", "--max-total-tokens=2048",
        "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled",
        "--hybrid=host_memory=256MiB", "--hybrid=worker=none", "--hybrid=policy=full",
    ])  # fmt: skip
    randomise(session.model)
    layers = DecoderLayers(session.model)
    predictors = {layer: QueryPredictor(layers.query_weights(layer)) for layer in layers.ids}
    backend = session.runner.attn_backend

    def run() -> list[torch.Tensor]:
        prefilled = session.prefill(PROMPTS)
        return [prefilled.logits.clone(), *decode(prefilled)]

    def decode(prefilled: Prefilled) -> list[torch.Tensor]:
        return [prefilled.step([(11 * i) % VOCABULARY, (13 * i) % VOCABULARY]).clone() for i in range(STEPS)]

    plain = run()

    predicted: dict[int, torch.Tensor] = {}
    queries: list[dict[str, Any]] = []

    def on_input(layer: int, inputs: torch.Tensor, positions: torch.Tensor, _batch: Any) -> None:
        predicted[layer] = predictors[layer].query(inputs, positions)

    def watched(mode: str) -> Any:
        forward = getattr(backend, f"forward_{mode}")

        def call(q: torch.Tensor, k: Any, v: Any, layer: Any, *rest: Any, **more: Any) -> Any:
            expected = predicted.pop(layer.layer_id)
            difference = (q.reshape(expected.shape) - expected).abs().max()
            queries.append({"mode": mode, "layer": layer.layer_id, "difference": float(difference)})
            queries[-1]["spread"] = float(q.std())
            return forward(q, k, v, layer, *rest, **more)

        return call

    orders: list[list[str]] = [[] for _ in plain]

    def on_logits(*_of_module: Any) -> None:
        steps = len(queries) // LAYERS
        orders[steps - 1].append("logits" if len(queries) % LAYERS == 0 else "early")

    ends = session.model.get_submodule("logits_processor").register_forward_hook(on_logits)
    stop = layers.on_input(on_input)
    backend.forward_extend, backend.forward_decode = watched("extend"), watched("decode")
    hooked = run()
    stop()
    ends.remove()
    del backend.forward_extend, backend.forward_decode
    again = run()

    weights = {layer: layers.query_weights(layer) for layer in layers.ids}
    random = torch.Generator().manual_seed(2)
    corrections = {
        layer: Correction(*(torch.randn(size, generator=random) for size in ((width, 5), (5, HIDDEN), (width,))))
        for layer in layers.ids[1:]
        for width in [weights[layer].projection.shape[0]]
    }

    calibrated = SimpleNamespace(
        bonus=(1.0,) * LAYERS, intervals=(2,) * LAYERS, miss_shares=(0.001,) * LAYERS, corrections=corrections
    )

    def with_prediction(
        prediction: Literal["auto", "raw", "none"], profile: Any = None
    ) -> tuple[list[torch.Tensor], list[int], float]:
        """Return the logits of the decode steps, the layers announced, and the largest error of announced queries."""
        config = HybridConfig(worker="none", prediction=prediction)
        session.use(config, profile)
        announced: list[int] = []
        differences = [0.0]
        formulas = {n: QueryPredictor(weights[n], corrections[n] if profile else None) for n in corrections}
        policy = backend.engine.attention.policy
        ahead = policy.ahead

        def announce(query: torch.Tensor, cache: Any, *rest: Any) -> None:
            announced.append(cache.layer)
            announcements[prediction] = query.clone()
            ahead(query, cache, *rest)

        def look_ahead(layer: int, inputs: torch.Tensor, positions: torch.Tensor, batch: Any) -> None:
            # runs after the backend's hook, which was registered first
            if layer + 1 in formulas and batch.forward_mode.is_decode() and announced:
                expected = formulas[layer + 1].query(inputs, positions)
                differences.append(float((announcements[prediction] - expected).abs().max()))

        policy.ahead = announce
        stop = layers.on_input(look_ahead)
        out = run()[1:]
        stop()
        return out, announced, max(differences)

    announcements: dict[str, torch.Tensor] = {}
    by_none, announced_without, _ = with_prediction("none")
    by_raw, announced, raw_difference = with_prediction("raw")
    by_calibrated, announced_calibrated, calibrated_difference = with_prediction("auto", calibrated)

    calibration = report_calibration(session, layers)

    # a budget below the context, so that rewinding has residents to forget
    session.use(HybridConfig(worker="none", budget_tokens=160, sections={"scout": ScoutOptions(recall_interval=2)}))
    parts: list[float] = []
    prefilled = session.prefill(PROMPTS, parts.append)
    once = decode(prefilled)
    prefilled.rewind()
    twice = decode(prefilled)

    facts = {
        "layers": layers.ids,
        "head_dim": weights[1].head_dim,
        "has_bias": weights[1].bias is not None,
        "has_head_norm": weights[1].head_norm is not None,
        "scale": layers.scale(1, torch.bfloat16),
        "queries": queries,
        "logits": orders,
        "same_with_hooks": same(plain, hooked),
        "same_without_hooks_again": same(plain, again),
        "same_with_raw_prediction": same(by_none, by_raw),
        "same_with_calibrated_prediction": same(by_none, by_calibrated),
        "same_after_rewind": same(once, twice),
        "parts_of_prefill": parts,
        "raw_difference": raw_difference,
        "calibrated_difference": calibrated_difference,
        "correction_changes": float((announcements["raw"] - announcements["auto"]).abs().max()),
        "identity": msgspec.structs.asdict(identity(session.runner)),
        "announced": announced,
        "announced_calibrated": announced_calibrated,
        "announced_without_prediction": announced_without,
        **calibration,
    }
    print("\n" + json.dumps(facts))


def report_calibration(session: Any, layers: DecoderLayers) -> dict[str, Any]:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.integration import automatic_calibration, calibrate
    from sglang_hybrid.integration.causal_forward import run_text
    from sglang_hybrid.policies.scout.calibration_text import CalibrationText, without_tokenizer

    def inputs(run: Any) -> dict[int, torch.Tensor]:
        seen: dict[int, torch.Tensor] = {}
        stop = layers.on_input(lambda layer, given, *_: seen.__setitem__(layer, given.clone()))
        run()
        stop()
        return seen

    session.use(HybridConfig(worker="none", prediction="none"))
    in_prefill = inputs(lambda: session.prefill(PROMPTS[:1]))
    alone = inputs(lambda: run_text(session.runner, PROMPTS[0], lambda *_: None))
    drawn = without_tokenizer(VOCABULARY, HIDDEN, 512)
    text = CalibrationText(drawn.fit[:4], drawn.unseen[:1], special=(tuple(range(VOCABULARY)),))
    automatic: Any = automatic_calibration
    automatic.text_for = lambda _runner: text
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SGLANG_HYBRID_CACHE"] = cache
        fitted = automatic_calibration.calibration_for(HybridConfig(profile="auto"), session.runner)
        automatic.calibrate = None  # the second call must not fit again
        found = automatic_calibration.calibration_for(HybridConfig(profile="auto"), session.runner)
    assert fitted is not None
    assert found is not None
    calibrate._MOST_BYTES = 1  # one layer at a time
    one_by_one = calibrate.calibrate(session.runner, text)
    same_files = [
        torch.equal(found.corrections[n].left, fitted.corrections[n].left)
        and torch.equal(found.channels[n], fitted.channels[n])
        and torch.equal(found.skews[n], fitted.skews[n])
        and torch.equal(found.steps[n], fitted.steps[n])
        for n in fitted.corrections
    ]
    covered = dict.fromkeys(layers.ids, True)

    def attended(layer: int, _queries: torch.Tensor, *stored: torch.Tensor) -> None:
        covered[layer] &= bool((torch.stack(stored).abs() <= 127 * fitted.steps[layer][:, None]).all())

    # at other positions than in calibration: rotation divides the norms of pairs of key channels otherwise
    run_text(session.runner, text.fit[0][:200], attended, first=97)
    for window in (*text.unseen, *text.special):
        run_text(session.runner, window, attended)
    probe = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3))
    return {
        "input_differences": [float((in_prefill[n] - alone[n]).abs().max()) for n in layers.ids],
        "cosines": [
            sum(getattr(one, name) for one in fitted.layers.values()) / len(fitted.layers)
            for name in ("cosine_raw", "cosine")
        ],
        "found_again": all(same_files) and len(same_files) == LAYERS - 1,
        "channels_are_orders": [
            sorted(order[0].tolist()) == list(range(order.shape[1])) for order in fitted.channels.values()
        ],
        "skews_are_orthogonal": [
            torch.allclose(skew.transpose(1, 2) @ skew, torch.eye(skew.shape[1]).expand_as(skew), atol=1e-4)
            for skew in fitted.skews.values()
        ],
        "steps_cover_the_text": covered,
        "group_difference": max(
            float((corrected(fitted.corrections[n], probe) - corrected(one_by_one.corrections[n], probe)).abs().max())
            for n in fitted.corrections
        ),
    }


def corrected(correction: Any, unit: torch.Tensor) -> torch.Tensor:
    """Return what a correction adds to the query, for low and full rank."""
    left = correction.left.float()
    matrix: torch.Tensor = left if correction.right is None else left @ correction.right.float()
    return unit @ matrix.T + torch.as_tensor(correction.bias).float()


def randomise(model: torch.nn.Module) -> None:
    """Give weights the size of trained weights. Dummy weights are so small that every query is about zero."""
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.ndim == 1:  # gains of norms, and biases
            parameter.data.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
        else:
            parameter.data.copy_(noise * parameter.shape[-1] ** -0.5)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
