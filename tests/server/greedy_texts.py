"""Print greedy tokens of one backend under many settings, from one process: a server's answers without its start.

    python greedy_texts.py MODEL BACKEND [FLAG ...] < REQUEST

REQUEST is {"prompts": [[token, ...]], "steps": 40, "settings": [["key=value", ...]]}. Each FLAG is a flag of SGLang.
The last line printed is {"tokens": [settings][prompts][steps]}. The setting ``profile=random`` uses a profile whose
predictor is noise: with a budget above the context no token may depend on it. BACKEND may be ``rounded``: stock's
``torch_native``, with every key and value rounded to FP8 before it is stored in the model's dtype.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_hybrid.config import load_config
from sglang_hybrid.integration.decoder_layers import DecoderLayers
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.integration.predictor import identity
from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile import HostRates, Profile, ProfileFacts


def random_profile(session: ModelSession, budget: int) -> Profile:
    model = identity(session.runner)
    layers = DecoderLayers(session.model)
    corrections = {}
    for layer in layers.ids[1:]:
        width, hidden = layers.query_weights(layer).projection.shape
        corrections[layer] = Correction(torch.randn(width, 4), torch.randn(4, hidden), torch.randn(width))
    per_layer = [1.0] * model.layers
    facts = ProfileFacts(
        model=model, block_tokens=32, budget_tokens=budget, beta=0.12, intervals=[3] * model.layers, bonus=per_layer,
        ranks=[4] * model.layers, cosine_raw=per_layer, cosine_calibrated=per_layer, block_change=per_layer, curves=[],
        rates=HostRates(cpu="", threads=1, read_gb_s=1.0, attention_gb_s=1.0), notes={},
    )  # fmt: skip
    return Profile(facts, corrections)


def round_to_fp8() -> None:
    """Patch stock's pool class, so that every pool rounds keys and values to FP8 before it stores them."""
    stock = MHATokenToKVPool.set_kv_buffer

    def rounded(pool: Any, layer: Any, slots: Any, keys: torch.Tensor, values: torch.Tensor, *more: Any) -> None:
        stored = (part.to(torch.float8_e4m3fn).to(part.dtype) for part in (keys, values))
        stock(pool, layer, slots, *stored, *more)

    MHATokenToKVPool.set_kv_buffer = rounded


def main() -> None:
    model, backend, *flags = sys.argv[1:]
    asked = json.load(sys.stdin)
    if backend == "rounded":
        backend = "torch_native"
        round_to_fp8()
    ours = ["--hybrid=host_memory=1GiB", "--hybrid=worker=none"] if backend == "hybrid" else ["--page-size=1"]
    session = ModelSession(
        [f"--model-path={model}", f"--attention-backend={backend}", "--device=cpu", "--dtype=float32",
         "--log-level=error", "--max-total-tokens=8192", "--skip-tokenizer-init", *ours, *flags]
    )  # fmt: skip
    prefilled = session.prefill(asked["prompts"])
    said = []
    for settings in asked["settings"]:
        if backend == "hybrid":
            named = [setting for setting in settings if setting != "profile=random"]
            config = load_config(None, named)
            profile = random_profile(session, config.budget_tokens) if named != settings else None
            session.use(config, profile)
            prefilled.rewind()
        tokens = [prefilled.logits.argmax(dim=1)]
        while len(tokens) < asked["steps"]:
            tokens.append(prefilled.step(tokens[-1]).argmax(dim=1))
        said.append(torch.stack(tokens, dim=1).tolist())
    print(json.dumps({"tokens": said}))


if __name__ == "__main__":
    main()
