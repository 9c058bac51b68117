"""Decode a given text instead of a sampled one, and score it: what perplexity of decode steps needs.

A server cannot do that: it scores a prompt in prefill, where attention is exact, and samples in
decode. This drives SGLang's model runner with our backend in it, as ``sglang.benchmark.one_batch``
does, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


class TeacherForcedDecode:
    """A loaded model. One per process: SGLang's runtime state is global."""

    def __init__(self, flags: Sequence[str]) -> None:
        """``flags``: SGLang's command line, such as ``--model-path DIR --attention-backend hybrid``."""
        from sglang_hybrid.integration.loading import load_plugin

        load_plugin()
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, prepare_server_args

        args = prepare_server_args([*flags])
        if hasattr(args, "resolve_once"):  # newer SGLang resolves in a step of its own, and publishes the result
            args.resolve_once()
            one_batch.publish(args, role="scheduler")
        one_batch._set_envs_and_config(args)
        self._one_batch = one_batch
        self._runner, self.tokenizer = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)

    def logprobs(
        self, prompt: Sequence[int], continuation: Sequence[int], progress: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Logprob of each token of ``continuation``: the first from prefill, the others from one decode step each."""
        pools = self._runner.torch_runner
        pools.req_to_token_pool.clear()
        pools.token_to_kv_pool_allocator.clear()
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(1, len(prompt), [list(prompt)])

        _, logits, batch = self._runner.extend(requests)
        scored = [_score(logits, continuation[0])]
        for step, (token, following) in enumerate(pairwise(continuation)):
            _, logits = self._runner.decode(torch.tensor([token], device=logits.device), batch)
            scored.append(_score(logits, following))
            if progress:
                progress(step)
        return torch.stack(scored)


def _score(logits: torch.Tensor, token: int) -> Any:
    return logits[0].float().log_softmax(dim=-1)[token].cpu()
