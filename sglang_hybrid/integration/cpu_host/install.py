"""Write (or remove) the ``.pth`` line that makes an environment a CPU environment.

python -m sglang_hybrid.integration.cpu_host.install [--remove]
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

# sorts after setuptools' "__editable__..." so that an editable install is importable by then
_PTH = "sglang_hybrid_cpu_host.pth"
_LINE = "import sglang_hybrid.integration.cpu_host.startup as s; s.run()\n"


def pth_path() -> Path:
    return Path(sysconfig.get_path("purelib")) / _PTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remove", action="store_true", help="make it an ordinary environment again")
    if parser.parse_args().remove:
        pth_path().unlink(missing_ok=True)
    else:
        pth_path().write_text(_LINE)
    print(pth_path())


if __name__ == "__main__":
    main()
