"""Who computes: one module per provider, imported when it is asked for."""

from __future__ import annotations

from cpu_worker.providers.base import Provider, ProviderError
from sglang_hybrid.protocol.messages import Provider as Name

__all__ = ["Provider", "ProviderError", "create"]


def create(name: Name) -> Provider:
    """A provider that is ready to start. Raises ProviderError where what it needs is not installed."""
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
