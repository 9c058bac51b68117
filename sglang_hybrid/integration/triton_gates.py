"""Answer SGLang, by backend name, whether Triton kernels may be used: with ours they may, except on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.integration import BACKEND_NAME


def support_triton(original: Callable[[str], bool], backend: str) -> bool:
    if backend == BACKEND_NAME and not torch.cuda.is_available():
        return False
    return original(backend)


def get_last_loc(
    original: Callable[..., torch.Tensor], req_to_token: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    if req_to_token.device.type == "cpu":
        from sglang.srt.mem_cache.allocation import get_last_loc_torch

        original = get_last_loc_torch
    return original(req_to_token, rows, prefix_lens)
