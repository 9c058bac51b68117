"""``sglang-hybrid check``: verify that the installed SGLang takes all our hooks."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from sglang_hybrid import __version__
from sglang_hybrid.integration.versions import INSTALLED


def main(arguments: Sequence[str]) -> int | None:
    """Return 1 if SGLang is not installed, None on success. End the process with one line if a hook is not in place."""
    argparse.ArgumentParser(
        prog="sglang-hybrid check",
        description="Load the plugin into the installed SGLang and list the hooks that are in place. Fails, with the "
        "name of the hook, where SGLang does not take one. Takes as long as importing SGLang does.",
    ).parse_args(arguments)
    if importlib.util.find_spec("sglang") is None:
        print(
            f"sglang-hybrid check: SGLang is not installed; install it: pip install sglang=={INSTALLED['cuda']}, "
            f"or {INSTALLED['cpu']} on a host without a GPU",
            file=sys.stderr,
        )
        return 1
    from sglang_hybrid.integration import hooks
    from sglang_hybrid.integration.activate import load_plugin
    from sglang_hybrid.integration.versions import installed_sglang

    load_plugin()
    print(f"sglang {installed_sglang()}: all hooks of sglang-hybrid {__version__} are in place")
    for hook in hooks.all_hooks():
        print(f"  {hook.kind.value:7} {hook.target}")
    return None
