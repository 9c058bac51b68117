"""A loaded model that prefills prompts once and decodes behind them again and again, each time in another way.

A server cannot do that: it scores a prompt in prefill, where attention is exact, and samples in decode. This drives
SGLang's model runner with our backend in it, as ``sglang.benchmark.one_batch`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.settings import unsupported_settings
from sglang_hybrid.integration import BACKEND_NAME
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.scout.profile import Profile


class ModelSession:
    """One per process: SGLang's runtime state is global."""

    def __init__(self, flags: Sequence[str], *, changes: bool = True) -> None:
        """``flags``: SGLang's command line, such as ``--model-path DIR --attention-backend hybrid``.

        ``changes``: settings will change, so that engines which cannot follow are left. Without changes the engine
        that a server with these flags would have decodes.
        """
        from sglang_hybrid.integration.activate import load_plugin

        load_plugin()
        logging.getLogger("sglang.srt.hybrid").setLevel(logging.WARNING)  # ours are for the user, at any --log-level
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, prepare_server_args

        args = prepare_server_args([*flags])
        if hasattr(args, "resolve_once"):  # newer SGLang resolves in a step of its own, and publishes the result
            args.resolve_once()
            one_batch.publish(args, role="scheduler", **_placement(one_batch))
        one_batch._set_envs_and_config(args)
        if args.skip_tokenizer_init:  # one_batch does not know the flag
            one_batch.get_tokenizer = lambda *_args, **_kwargs: None
        self._one_batch = one_batch
        self._bench, self.tokenizer = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner = self._bench.torch_runner
        if args.attention_backend == BACKEND_NAME and changes:
            # settings and policies change all the time here, and some policies only watch
            self.runner.attn_backend.expect_changes()
        # off on a CPU, and with settings that the CUDA kernels cannot have
        self._by_graphs = args.attention_backend == BACKEND_NAME and not self.runner.server_args.disable_cuda_graph

    @property
    def model(self) -> torch.nn.Module:
        module: torch.nn.Module = self.runner.model
        return module

    @property
    def model_config(self) -> Any:
        return self.runner.model_config

    @property
    def capacity_tokens(self) -> int:
        return int(self.runner.max_total_num_tokens)

    def use(self, config: HybridConfig, profile: Profile | None = None) -> None:
        """Decode by other settings from now on, and by ``profile`` instead of the one they name.

        Where CUDA graphs decode, they are recorded anew: the old ones hold the buffers of the settings before.
        Raises Refusal for what this model cannot do, or graphs cannot.
        """
        if self._by_graphs and (why := unsupported_settings(config)):
            raise Refusal(
                f"the CUDA kernels do not do this ({why}): decode in plain torch, --server-flag=--disable-cuda-graph"
            )
        self.runner.attn_backend.use(config, profile)
        if self._by_graphs:
            self.runner.init_cuda_graphs()

    def use_policy(self, policy: DecodePolicy, config: HybridConfig, profile: Profile | None = None) -> None:
        """The same, but by another policy than the settings name. It runs in torch: graphs would go on without it."""
        if self._by_graphs:
            raise Refusal("a policy of one's own runs in plain torch: load the model with --disable-cuda-graph")
        self.use(config, profile)
        self.runner.attn_backend.use_policy(policy)

    def choose_channels(self, profile: Profile) -> None:
        """What sketches hold, from now on: before prompts are prefilled."""
        self.runner.attn_backend.choose_channels(profile)

    def watch_ratio(self, watcher: Callable[[int, float], None] | None) -> None:
        """Tell ``watcher`` every layer's CPU compute ratio at every decode step, until settings change."""
        self.runner.attn_backend.watch_ratio(watcher)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer, by the model's configuration and its tokenizer."""
        ends = set(getattr(self.model_config, "hf_eos_token_id", None) or ())
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ends.add(self.tokenizer.eos_token_id)
        return frozenset(ends)

    def text(self, ids: Sequence[int]) -> str:
        decoded: str = self.tokenizer.decode(list(ids))
        return decoded

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None] = lambda _part: None
    ) -> Prefilled:
        """Forgets all prompts before these. ``progress`` is told of each part that is done; the parts sum to 1."""
        self._bench.clear()
        longest = max(map(len, prompts))
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(
            len(prompts), longest, [list(prompt) for prompt in prompts]
        )
        with self._telling_progress(progress):
            _, logits, batch = self._bench.extend(requests)
        return Prefilled(self._bench, self.runner, batch, logits)

    def prefill_in_turn(
        self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None] = lambda _part: None
    ) -> Prefilled:
        """As ``prefill``, one prompt after the other: the activations of many long prompts would not fit in memory."""
        self._bench.clear()
        joined, logits = None, []
        for prompt in prompts:
            requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(1, len(prompt), [list(prompt)])
            _, of_prompt, batch = self._bench.extend(requests)
            logits.append(of_prompt)
            if joined is None:
                joined = batch
            else:
                joined.merge_batch(batch)
            progress(1 / len(prompts))
        return Prefilled(self._bench, self.runner, joined, torch.cat(logits))

    @contextmanager
    def _telling_progress(self, progress: Callable[[float], None]) -> Iterator[None]:
        """While one forward pass runs: its attention layers are equal parts of it."""
        from sglang.srt.layers.radix_attention import RadixAttention

        layers = [module for module in self.model.modules() if isinstance(module, RadixAttention)]
        handles = [layer.register_forward_hook(lambda *_: progress(1 / len(layers))) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _placement(one_batch: Any) -> dict[str, Any]:
    """The only rank of one, which SGLang since 0.5.21 wants to be told."""
    if not hasattr(one_batch, "SpawnRanks"):
        return {}
    return {"ranks": one_batch.SpawnRanks(world_rank=0, gpu_id=0)}


class Prefilled:
    """Prompts in the cache. Decoding behind them can begin again any number of times."""

    def __init__(self, bench: Any, runner: Any, batch: Any, logits: torch.Tensor) -> None:
        self._bench = bench
        self._runner = runner
        self._batch = batch
        self.logits = logits.float()  # [prompts, vocabulary], of the token behind each prompt
        self._lengths = {name: getattr(batch, name).clone() for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens")}
        allocator = runner.token_to_kv_pool_allocator
        self._pages = (allocator.free_pages, allocator.release_pages)

    def rewind(self) -> None:
        """Back to the end of the prompts."""
        for name, value in self._lengths.items():
            setattr(self._batch, name, value.clone())
        self._batch.seq_lens_sum = None
        allocator = self._runner.token_to_kv_pool_allocator
        allocator.free_pages, allocator.release_pages = self._pages
        self._runner.attn_backend.reset_rows(self._batch.req_pool_indices)

    def step(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Decode one given token of each prompt: the logits of what follows, ``[prompts, vocabulary]``."""
        given = torch.as_tensor(tokens, device=self.logits.device)
        logits: torch.Tensor = self._bench.decode(given, self._batch)[1]
        # a copy: a recorded graph writes the logits of the next step to the same place
        return logits.to(torch.float32, copy=True)
