#!/usr/bin/env python3
"""How many instructions `score_blocks` takes for eight blocks: compiles it and counts those of its loop. No GPU.

    python bench/score_instructions.py [--arch 90] [--head-dim 128] [--channels 32]

Needs nvcc and cuobjdump; Triton brings one of the latter. The loop is the shortest backward branch around the products
on the tensor cores. What a loop skips in some turns counts too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import write_result

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
FORMATS = ("minmax", "compact")
SOURCE = """
#include "sglang_hybrid/cuda/score_blocks.cuh"
using namespace sglang_hybrid::cuda;
template __global__ void sglang_hybrid::cuda::score_blocks<BFloat16, {dim}, {channels}, Format::{format}, 1>(
    const __grid_constant__ sh_score_blocks);
"""
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(.*?);")
_LEAST_PRODUCTS = 20  # of the loop: others have none


def cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    triton = find_spec("triton")
    if found is None and triton and triton.origin:
        found = str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    if found is None:
        raise SystemExit("neither cuobjdump nor Triton, which has one, is there")
    return found


def loop_of(listing: str) -> list[str]:
    """The instructions of the loop, without their operands."""
    found = [(int(match[1], 16), match[2]) for match in map(_INSTRUCTION.match, listing.splitlines()) if match]
    loops = []
    for address, text in found:
        target = re.match(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            loops.append([one.split()[0] for at, one in found if int(target[1], 16) <= at <= address])
    return min((loop for loop in loops if sum(one.startswith("HMMA") for one in loop) > _LEAST_PRODUCTS), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--out", type=Path, help="default: bench/results/score-instructions.json")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "one.cu", Path(folder) / "one.cubin"
        for format_ in FORMATS:
            source.write_text(SOURCE.format(dim=args.head_dim, channels=args.channels, format=format_))
            includes = [f"-I{KERNELS / side / 'include'}" for side in ("cuda", "cpu")]
            command = ["nvcc", "-std=c++20", f"-arch=sm_{args.arch}", "-cubin", *includes, str(source), "-o", str(made)]
            subprocess.run(command, check=True)
            listing = subprocess.run([cuobjdump(), "-sass", str(made)], check=True, capture_output=True, text=True)
            loop = loop_of(listing.stdout)
            kinds = Counter(one.partition(".")[0] for one in loop).most_common(12)
            rows.append({"format": format_, "instructions": len(loop), "most": dict(kinds)})
            print(rows[-1], flush=True)
    settings = {"arch": args.arch, "head_dim": args.head_dim, "channels": args.channels}
    print(write_result("score-instructions", {"settings": settings, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
