"""Cache directory for files that outlive a checkout: converted models, compiled kernels."""

import os
from pathlib import Path

from sglang_hybrid import env


def default_cache_dir() -> Path:
    """Return `$SGLANG_HYBRID_CACHE`, else `$XDG_CACHE_HOME/sglang-hybrid`, else `~/.cache/sglang-hybrid`."""
    if chosen := env.CACHE.get():
        return chosen.expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "sglang-hybrid"
    return Path.home() / ".cache" / "sglang-hybrid"
