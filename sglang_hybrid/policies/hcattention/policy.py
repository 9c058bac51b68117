"""Policy ``hcattention``: HCAttention as its paper has it.

The model's device keeps one index per group of channels of every key, and no values. A step sums table entries to the
logits of all tokens (equation 3), takes the softmax, keeps for each query head the fewest tokens that together have
``tau`` of the attention (equation 4), and posts their weights: the CPU adds up their values (equation 5).

Every write of keys also writes their codes, so the tail, the block that is being filled, is like all other blocks. With
whole keys on the device (``codebook=none``, the paper's setting of 50 % of the memory) and tau 1 this policy is full
attention: all logits are exact, and all tokens are kept.

This module is the specification, and serves in torch on every device. On a GPU ``engines/cuda/hcattention.py`` does the
same in CUDA graphs. Lists for the worker may be as long as the context (``Needs.long_lists``). If a list is longer than
the mailbox holds, the GPU sums the values of that row itself.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.hcattention.codebook_facts import CodebookError, named
from sglang_hybrid.policies.hcattention.codebooks import QuantisedKeys, load_codebooks
from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.registry import ModelPart, PolicyContext, PolicyError
from sglang_hybrid.policies.scout.profile_facts import ProfileError
from sglang_hybrid.worker.miss_server import MissServer


class WholeKeys:
    """Encodes keys as their own bytes; implements ``memory.key_codes.KeyEncoder``."""

    def encode(self, _layer: int, keys: torch.Tensor) -> torch.Tensor:
        return keys.contiguous().view(torch.uint8)


class HCAttention(DecodePolicy):
    """The policy in torch. ``on_ratio`` gets the share of tokens that query heads keep: the paper's selection ratio."""

    def __init__(self, options: HCAttentionOptions, misses: MissServer, keys: QuantisedKeys | None) -> None:
        """``keys``: the encoder of the cache's codes; None: codes are whole keys."""
        self._tau, self._renormalises = options.tau, options.renormalise
        self._misses = misses
        self._keys = keys

    def begin_step(self, batch: DecodeBatch) -> None:
        self._misses.wake()

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        heads, tokens = cache.keys.shape[1], cache.block_tokens
        pages = batch.page_table[:, None, :].expand(-1, heads, -1)  # [B, H, N]
        logits = self._logits(query, cache, pages) * scale
        there = torch.arange(logits.shape[3], device=query.device) < batch.lengths[:, None]
        weights = logits.masked_fill(~there[:, None, None, :], -torch.inf).softmax(dim=3)
        kept = reference_weights.cumulative_share(weights, self._tau)
        if self.on_ratio:
            shares = kept.sum(dim=3) / batch.lengths[:, None, None]
            self.on_ratio(cache.layer, float(shares.mean()))
        weights = weights * kept
        if self._renormalises:
            weights = weights / weights.sum(dim=3, keepdim=True)
        ids, weights = _listed(pages, weights.unflatten(3, (-1, tokens)))
        return self._misses.post_sum(weights, cache, ids, batch.step).collect().to(query.dtype)

    def _logits(self, query: torch.Tensor, cache: LayerCache, pages: torch.Tensor) -> torch.Tensor:
        """Return ``q . k`` of all tokens of the rows' pages: ``[B, H, G, N * T]``."""
        assert cache.codes is not None
        codes = reference.gather_blocks(cache.codes, pages, query.device).flatten(2, 3)  # [B, H, N * T, bytes]
        if self._keys is None:
            grouped = query.float().view(*codes.shape[:2], -1, query.shape[-1])
            return grouped @ codes.view(cache.keys.dtype).float().transpose(2, 3)
        tables = reference_weights.lookup_tables(query, self._keys.tables(cache.layer))
        return reference_weights.lookup_logits(tables, self._keys.indices(codes))


def _listed(pages: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List the blocks of which a query head keeps a token, padded with ``NO_BLOCK``, and the weights of their tokens.

    pages ``[B, H, N]``, weights ``[B, H, G, N, T]`` -> ``[B, H, n]``, ``[B, H, G, n, T]``.
    """
    wanted = (weights != 0).any(dim=4).any(dim=2)
    longest = int(wanted.sum(dim=2).max()) if wanted.numel() else 0
    order = (~wanted).to(torch.uint8).argsort(dim=2, stable=True)[..., :longest]
    ids = pages.gather(2, order).masked_fill(~wanted.gather(2, order), reference.NO_BLOCK)
    where = order[:, :, None, :, None].expand(-1, -1, weights.shape[2], -1, weights.shape[4])
    return ids, weights.gather(3, where)


def create(context: PolicyContext) -> HCAttention:
    """Create the policy. Raise PolicyError for a pool without codes, and for a codebook that does not fit."""
    options, codes = context.config.section(HCAttentionOptions), context.codes
    if codes is None:
        raise PolicyError(
            "policy hcattention needs a KV pool with codes of keys: set policy=hcattention from the start"
        )
    return HCAttention(options, context.misses, use_codebook(options.codebook, codes, context.model))


def use_codebook(codebook: str, codes: KeyCodes, model: ModelPart | None) -> QuantisedKeys | None:
    """Encode keys by ``codebook`` from now on. Return the encoder of ``codes``; None if codes are whole keys.

    A file is read only once, because engines share its codebooks. Raise PolicyError for a file that does not fit.
    """
    if codebook == "none":
        codes.use(WholeKeys())
        return None
    if isinstance(codes.encoder, QuantisedKeys) and codes.encoder.file == codebook:
        return codes.encoder
    keys = _quantised(codebook, codes, model)
    keys.file = codebook
    codes.use(keys)
    return keys


def _quantised(codebook: str, codes: KeyCodes, model: ModelPart | None) -> QuantisedKeys:
    with named(codebook):
        codebooks = load_codebooks(Path(codebook))
        if model is not None:
            try:
                served = model.identity()
            except ProfileError as error:
                raise CodebookError(str(error)) from error
            codebooks.facts.check(msgspec.structs.asdict(served))
    heads = model.kv_heads if model is not None else slice(None)
    return codebooks.part(heads, codes.device)
