"""``sglang-hybrid check``: verify that the installed SGLang takes all our hooks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_hybrid import __version__


def main(arguments: Sequence[str]) -> None:
    """Ends the process with one line where a hook is not in place."""
    argparse.ArgumentParser(
        prog="sglang-hybrid check",
        description="Load the plugin into the installed SGLang and list the hooks that are in place. Fails, with the "
        "name of the hook, where SGLang does not take one. Takes as long as importing SGLang does.",
    ).parse_args(arguments)
    from sglang_hybrid.integration import hooks
    from sglang_hybrid.integration.activate import load_plugin
    from sglang_hybrid.integration.versions import installed_sglang

    load_plugin()
    print(f"sglang {installed_sglang()}: all hooks of sglang-hybrid {__version__} are in place")
    for hook in hooks.all_hooks():
        print(f"  {hook.kind.value:7} {hook.target}")
