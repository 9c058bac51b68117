"""``python -m bench.chaos.server``: SGLang's server with the switches of a chaos run.

multiprocessing imports the main module in every process that it spawns, so importing this module is enough to reach the
process that runs the model.
"""

from __future__ import annotations

import runpy

from bench.chaos import inside

inside.wait_for_the_backend()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
