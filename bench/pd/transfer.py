"""Checks whether this machine can load a transfer backend of SGLang's disaggregation."""

from __future__ import annotations

import importlib
import sys

# backend -> (module that SGLang imports, how to install the packages that provide it)
NEEDED = {
    "nixl": ("nixl._api", "pip install nixl nixl_cu13 (CUDA 13), or nixl nixl_cu12 (CUDA 12)"),
    "mooncake": ("mooncake.engine", "pip install mooncake-transfer-engine, and libibverbs1 of the system"),
}
HELP = "; ".join(f"{name} needs {how.removeprefix('pip install ')}" for name, (_, how) in NEEDED.items())


def require_transfer(backend: str) -> None:
    """End the program with a message if ``backend`` cannot be loaded: a server would fail only minutes later."""
    if backend not in NEEDED:
        sys.exit(f"--transfer {backend}: take one of {', '.join(NEEDED)}")
    module, how = NEEDED[backend]
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        sys.exit(f"--transfer {backend} cannot be loaded ({error}): {how}")
