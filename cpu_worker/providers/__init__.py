"""Providers compute the worker's answers. Each one has a module, which is imported when the provider is chosen."""

from __future__ import annotations

from cpu_worker.providers.base import Provider, ProviderError
from sglang_hybrid.protocol.messages import Provider as Name

__all__ = ["Provider", "ProviderError", "create"]


def create(name: Name) -> Provider:
    """Return a provider that is ready to start. Raise ProviderError if its requirements are not installed."""
    match name:
        case "native":
            from cpu_worker.providers.native import NativeProvider

            return NativeProvider()
        case "torch":
            from cpu_worker.providers.torch import TorchProvider

            return TorchProvider()
        case "ipex":
            from cpu_worker.providers.ipex import IpexProvider

            return IpexProvider()
