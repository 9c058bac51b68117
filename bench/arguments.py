"""Flags and checks that several benchmarks share."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.synthetic_model import Character, Shape, ensure_model


def tokens_of(text: str) -> int:
    """Return the number of tokens that ``text`` means: ``32k`` is 32,768, ``500`` is 500."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def is_installed() -> bool:
    """Return True if the processes that SGLang spawns will load the plugin."""
    return any(one.name == "sglang_hybrid" for one in importlib.metadata.entry_points(group="sglang.srt.plugins"))


def require_plugin() -> None:
    if not is_installed():
        sys.exit("SGLang will not find the plugin: install the package, pip install --no-deps --editable .")


def model_of(given: Path | None, shape: Shape) -> Path:
    """Return a model directory: ``given`` if it holds a model, otherwise a synthetic model of ``shape``.

    The synthetic model is written to ``given``, or to a temporary directory if ``given`` is None.
    """
    if given and (given / "config.json").is_file():
        return given
    target = given or Path(tempfile.gettempdir()) / f"sglang-hybrid-synthetic-{shape.layers}x{shape.hidden}"
    begin = time.monotonic()
    ensure_model(target, shape, Character())
    print(f"model: {target} ({time.monotonic() - begin:.0f} s)", flush=True)
    return target


def add_model_flags(parser: argparse.ArgumentParser, layers: int = Shape.layers) -> None:
    parser.add_argument("--model", type=Path, help="model directory; a synthetic model is made there if there is none")
    parser.add_argument("--layers", type=int, default=layers, help="of the model that is made (default %(default)s)")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stock-backend", default="flashinfer", help="attention backend of stock (default flashinfer)")
    parser.add_argument("--hybrid", metavar="KEY=VALUE", action="append", default=[], help="setting; may be repeated")
    parser.add_argument("--flag", action="append", default=[], help="flag of all servers, as --flag=--log-level=debug")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")


@contextlib.contextmanager
def log_folder(given: Path | None) -> Iterator[Path]:
    """Yield the folder for servers' logs: ``given``, created if missing and kept, or one that is removed at the end."""
    if given:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def add_run_flags(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--lease", type=float, metavar="SECONDS",
        help="after which nothing new begins, so that a run ends within a GPU lease; results are written after every "
        "point (default: no limit)",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="where servers' logs stay; default: nowhere")
    parser.add_argument("--out", type=Path, help=f"default: bench/results/{name}.json")
