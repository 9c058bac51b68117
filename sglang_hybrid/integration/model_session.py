"""A loaded model that prefills prompts once and decodes after them repeatedly, each time with other settings.

A server cannot do that: it scores a prompt in prefill, where attention is exact, and samples in decode. This module
drives SGLang's model runner with our backend, as ``sglang.benchmark.one_batch`` does.
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
    """A model that is loaded into this process, without a server. One per process: SGLang's runtime state is global."""

    def __init__(self, flags: Sequence[str], *, changes: bool = True) -> None:
        """``flags``: SGLang's command line, such as ``--model-path DIR --attention-backend hybrid``.

        ``changes``: whether settings will change. Then engines that cannot change theirs are not used. Otherwise the
        engine is the one that a server with these flags would have.
        """
        from sglang_hybrid.integration.activate import load_plugin

        load_plugin()
        # our warnings are for the user, at any --log-level
        logging.getLogger("sglang.srt.hybrid").setLevel(logging.WARNING)
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, prepare_server_args

        args = prepare_server_args([*flags])
        if hasattr(args, "resolve_once"):  # newer SGLang resolves in a separate step, and publishes the result
            args.resolve_once()
            one_batch.publish(args, role="scheduler", **_placement(one_batch))
        one_batch._set_envs_and_config(args)
        if args.skip_tokenizer_init:  # one_batch does not know the flag
            one_batch.get_tokenizer = lambda *_args, **_kwargs: None
        self._one_batch = one_batch
        self._bench, self.tokenizer = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner = self._bench.torch_runner
        if args.attention_backend == BACKEND_NAME and changes:
            # settings and policies change often here, and some policies only observe
            self.runner.attn_backend.expect_changes()
        # CUDA graphs are disabled on a CPU, and with settings that the CUDA kernels do not support
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
        """Decode with other settings from now on, and with ``profile`` instead of the one that they name.

        CUDA graphs are recorded anew, because the old ones hold the buffers of the previous settings. Raise Refusal for
        settings that the model or CUDA graphs do not support.
        """
        if self._by_graphs and (why := unsupported_settings(config)):
            raise Refusal(
                f"the CUDA kernels do not do this ({why}): decode in plain torch, --server-flag=--disable-cuda-graph"
            )
        self.runner.attn_backend.use(config, profile)
        if self._by_graphs:
            self.runner.init_cuda_graphs()

    def use_policy(self, policy: DecodePolicy, config: HybridConfig, profile: Profile | None = None) -> None:
        """Decode as with ``use``, but by ``policy``. The policy runs in torch, because CUDA graphs would ignore it."""
        if self._by_graphs:
            raise Refusal("a policy of one's own runs in plain torch: load the model with --disable-cuda-graph")
        self.use(config, profile)
        self.runner.attn_backend.use_policy(policy)

    def choose_channels(self, profile: Profile) -> None:
        """Choose the key channels that sketches store from now on. Call this method before prompts are prefilled."""
        self.runner.attn_backend.choose_channels(profile)

    def watch_ratio(self, watcher: Callable[[int, float], None] | None) -> None:
        """Call ``watcher`` with every layer's CPU compute ratio at every decode step, until settings change."""
        self.runner.attn_backend.watch_ratio(watcher)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the tokens that end an answer, by the model's configuration and its tokenizer."""
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
        """Prefill ``prompts`` in one pass, and drop all earlier prompts from the cache.

        ``progress`` is called with each share of the pass that is done; the shares sum to 1.
        """
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
        """Prefill prompts one after the other: the activations of many long prompts at once would not fit in memory."""
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
        """Report the progress of one forward pass within this context: its attention layers are equal shares of it."""
        from sglang.srt.layers.radix_attention import RadixAttention

        layers = [module for module in self.model.modules() if isinstance(module, RadixAttention)]
        handles = [layer.register_forward_hook(lambda *_: progress(1 / len(layers))) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _placement(one_batch: Any) -> dict[str, Any]:
    """Return the arguments that describe the only rank: SGLang requires them since 0.5.21."""
    if not hasattr(one_batch, "SpawnRanks"):
        return {}
    return {"ranks": one_batch.SpawnRanks(world_rank=0, gpu_id=0)}


class Prefilled:
    """Prompts in the KV cache. Decoding after them can start again any number of times."""

    def __init__(self, bench: Any, runner: Any, batch: Any, logits: torch.Tensor) -> None:
        self._bench = bench
        self._runner = runner
        self._batch = batch
        self.logits = logits.float()  # [prompts, vocabulary], of the token after each prompt
        self._lengths = {name: getattr(batch, name).clone() for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens")}
        allocator = runner.token_to_kv_pool_allocator
        self._pages = (allocator.free_pages, allocator.release_pages)

    def rewind(self) -> None:
        """Drop all decoded tokens: the next step continues at the end of the prompts."""
        for name, value in self._lengths.items():
            setattr(self._batch, name, value.clone())
        self._batch.seq_lens_sum = None
        allocator = self._runner.token_to_kv_pool_allocator
        allocator.free_pages, allocator.release_pages = self._pages
        self._runner.attn_backend.reset_rows(self._batch.req_pool_indices)

    def step(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Decode one given token of each prompt, and return the next token's logits ``[prompts, vocabulary]``."""
        given = torch.as_tensor(tokens, device=self.logits.device)
        logits: torch.Tensor = self._bench.decode(given, self._batch)[1]
        # a copy: a recorded graph writes the logits of the next step to the same memory
        return logits.to(torch.float32, copy=True)
