"""``python -m sglang_hybrid.bench_offline_throughput``: SGLang's benchmark of that name, with the plugin loaded.

SGLang's own entry point does not load plugins before it reads its arguments. This module loads the plugin when it is
imported, because the processes that the benchmark spawns import this module again.
"""

from sglang_hybrid.integration.activate import load_plugin

load_plugin()

if __name__ == "__main__":
    from sglang.benchmark.offline_throughput import cli_main

    from sglang_hybrid.commands.bench import run_with_defaults

    run_with_defaults(cli_main)
