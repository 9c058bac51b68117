"""Load and verify the plugin at once. Our launchers do so, because SGLang's own loading only logs a failure."""

from __future__ import annotations

import sys


def load_plugin() -> None:
    """Register with SGLang, load all plugins and verify our hooks. Exit with a message of one line on failure."""
    from sglang.srt.plugins import load_plugins

    from sglang_hybrid import plugin
    from sglang_hybrid.integration import hooks, server_args
    from sglang_hybrid.integration.versions import UntestedSGLang

    try:
        plugin.register()
        load_plugins()
        hooks.verify()
        server_args.set_defaults_of_every_backend()
    except (UntestedSGLang, hooks.HookError) as error:
        sys.exit(f"sglang-hybrid: {error}")
