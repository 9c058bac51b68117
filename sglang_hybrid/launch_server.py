"""``python -m sglang_hybrid.launch_server``: the same as ``sglang-hybrid serve``."""

from __future__ import annotations

import sys

from sglang_hybrid.commands.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
