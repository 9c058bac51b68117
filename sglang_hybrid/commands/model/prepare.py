"""The two things a caller wants: the default model's directory, and the conversion of a GGUF of one's own."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from sglang_hybrid.commands.model.build_once import build_once
from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.locate import MODEL_NAME, GgufSource, packaged_gguf
from sglang_hybrid.user_cache import default_cache_dir

# Raise it when the converter writes something different: every cached conversion is then rebuilt.
CONVERTER_VERSION = 1

Report = Callable[[str], None]


def prepare_default_model(cache_dir: Path | None = None, report: Report | None = None) -> Path:
    """Return the Hugging Face directory of the default model, converting it on the first call.

    Later calls only stat files. Safe to call from several processes at once: one converts, the others wait.
    Raises DefaultModelError with a message that says what to do.
    """
    target = (cache_dir or default_cache_dir()).resolve() / "models" / MODEL_NAME
    return _convert_once(packaged_gguf(), target, report)


def prepare_gguf(gguf: Path, out: Path, report: Report | None = None) -> Path:
    """Convert a GGUF (Llama or Qwen2 architecture, byte-level BPE) into the directory `out`."""
    if not gguf.is_file():
        raise DefaultModelError(f"There is no file {gguf}.")
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    identity: dict[str, str | int] = {"file": gguf.name, "bytes": gguf.stat().st_size, "sha256": digest}
    return _convert_once(GgufSource(gguf, identity), out.resolve(), report)


def _convert_once(source: GgufSource, target: Path, report: Report | None) -> Path:
    say = report or (lambda line: None)

    def build(directory: Path) -> None:
        # Here, so that a call that finds the model ready imports neither the GGUF reader nor numpy.
        from rich.console import Console

        from sglang_hybrid.commands.model.gguf_to_hf import convert_gguf

        say(f"converting {source.path.name}")
        convert_gguf(source.path, directory, Console(quiet=True))

    identity = {"converter_version": CONVERTER_VERSION, "source": source.identity}
    return build_once(target, identity, build, say)
