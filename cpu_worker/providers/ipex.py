"""Provider ``ipex``: provider ``torch`` with the flash attention of Intel's extension for PyTorch."""

from __future__ import annotations

import importlib
from importlib import metadata

from cpu_worker.providers.base import ProviderError
from cpu_worker.providers.torch import Kernel, TorchProvider  # before torch: this import's error says what to do

import torch  # isort: skip


class IpexProvider(TorchProvider):
    name = "ipex"

    def __init__(self) -> None:
        super().__init__()
        if reason := _built_for_another_torch():
            raise ProviderError(reason)  # importing the extension would print and fail with another error
        try:
            importlib.import_module("intel_extension_for_pytorch")  # registers torch.ops.torch_ipex
        except Exception as error:  # built for another torch, the import fails in many ways
            raise ProviderError(
                f"provider ipex cannot be loaded ({type(error).__name__}: {error}). It is an optional extra, for x86 "
                "only, that needs torch 2.8 in an environment of the worker's own (requirements/ipex.txt has the "
                "commands); start the worker there by hand. Intel archived the project in March 2026, with known "
                "security issues: prefer provider=native"
            ) from error
        if not hasattr(torch.ops.torch_ipex, "flash_attention"):
            raise ProviderError("this intel_extension_for_pytorch has no flash_attention: use provider=native")

    def kernel(self) -> Kernel:
        def flash_attention(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            result: tuple[torch.Tensor, torch.Tensor] = torch.ops.torch_ipex.flash_attention(
                query, keys, values, 0.0, False, scale=scale
            )
            return result

        return flash_attention


def _built_for_another_torch() -> str | None:
    try:
        installed = metadata.version("intel-extension-for-pytorch")
    except metadata.PackageNotFoundError:
        return None
    wanted = ".".join(installed.split(".")[:2])
    if torch.__version__.startswith(f"{wanted}."):
        return None
    return (
        f"provider ipex: intel-extension-for-pytorch {installed} needs torch {wanted}, and the worker's environment "
        f"has {torch.__version__}: give it an environment of its own (requirements/ipex.txt has the commands), or use "
        "provider=native"
    )
