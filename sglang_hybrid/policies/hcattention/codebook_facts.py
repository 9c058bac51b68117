"""The metadata of a codebook file, and the device memory that its codes need. Imports no torch.

In the paper, the columns of tables 4a and 4b share one codebook among all groups, and "*" marks a codebook for each
group, as equation C in R^(g x c x d/g) of section 3.1 says. An index counts 16 bits there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.registry import PolicyError
from sglang_hybrid.policies.scout.profile_facts import ModelIdentity, other_model
from sglang_hybrid.safetensors_header import read_metadata

if TYPE_CHECKING:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.memory.capacity import KVShape

VERSION = 1
METADATA_KEY = "sglang_hybrid_codebooks"
MOST_CENTROIDS = 8192  # the paper's largest; 13 bits
_ONE_BYTE = 256  # centroids that an index of one byte can number
_MAKE = "sglang-hybrid profile --codebook makes one"


class CodebookError(PolicyError):
    """A codebook file cannot be used. The message says why, with both values if two differ."""


class CodebookFacts(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    model: ModelIdentity
    groups: int  # parts that a key of head_dim channels is cut into
    centroids: int  # of each codebook
    shared: bool  # True: all groups of a KV head share one codebook; False: one each
    notes: dict[str, Any] = {}  # command, date, tokens

    @property
    def index_bytes(self) -> int:
        return 1 if self.centroids <= _ONE_BYTE else 2

    @property
    def code_bytes(self) -> int:
        """Return the bytes of the code of one key of one KV head."""
        return self.groups * self.index_bytes

    @property
    def part(self) -> int:
        """Return the number of channels of a group."""
        return self.model.head_dim // self.groups

    def check(self, served: Mapping[str, Any]) -> None:
        """Raise CodebookError if the model differs from ``served``: fields of ModelIdentity that are known."""
        if wrong := other_model("codebooks", self.model, served):
            raise CodebookError(f"made for something else: {'; '.join(wrong)}; {_MAKE} for this model")


def read_facts(path: Path) -> CodebookFacts:
    """Read the facts from the header of a codebook file. Raise CodebookError if that fails."""
    if not path.is_file():
        raise CodebookError(f"there is no such file; {_MAKE}")
    try:
        return facts_of(read_metadata(path))
    except CodebookError:
        raise
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CodebookError(f"cannot be read: {error}") from error


def facts_of(metadata: Mapping[str, str] | None) -> CodebookFacts:
    """Decode the facts in a file's metadata. Raise CodebookError or msgspec.MsgspecError if they are not valid."""
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise CodebookError(f"holds no codebooks: a safetensors file without our metadata; {_MAKE}")
    facts = msgspec.json.decode(text, type=CodebookFacts)
    if facts.version != VERSION:
        raise CodebookError(f"has format version {facts.version}, this release reads {VERSION}; make it anew")
    if not 1 <= facts.centroids <= MOST_CENTROIDS or facts.groups < 1 or facts.model.head_dim % facts.groups:
        raise CodebookError(
            f"damaged: {facts.groups} groups of {facts.model.head_dim} channels, {facts.centroids} centroids"
        )
    return facts


def facts_named(codebook: str) -> CodebookFacts:
    """Read the facts of the file that ``hcattention.codebook`` names. Raise CodebookError, which names the setting."""
    with named(codebook):
        return read_facts(Path(codebook))


@contextlib.contextmanager
def named(codebook: str) -> Iterator[None]:
    """Prefix every CodebookError that is raised within this context with the setting that names the file."""
    try:
        yield
    except CodebookError as error:
        raise CodebookError(f"hcattention.codebook={codebook}: {error}") from error


# -- what the registry asks --------------------------------------------------------------------------------------------


def code_bytes(config: HybridConfig, shape: KVShape) -> int:
    """Return the bytes kept of every key of a KV head: indices, or the key itself. Raise CodebookError."""
    codebook = config.section(HCAttentionOptions).codebook
    if codebook == "none":
        return shape.key_dim * shape.itemsize
    facts = facts_named(codebook)
    with named(codebook):
        facts.check({"head_dim": shape.key_dim, "layers": shape.layers})
    return facts.code_bytes


def describe(config: HybridConfig) -> str:
    """Return a sentence about what these settings keep on the model's device."""
    codebook = config.section(HCAttentionOptions).codebook
    if codebook == "none":
        return "whole keys are on the model's device: 50 % of the KV cache"
    facts = facts_named(codebook)
    share = facts.code_bytes / (2 * 2 * facts.model.head_dim)
    shared = "one codebook for all groups" if facts.shared else "a codebook for each group"
    return (
        f"keys are {facts.groups} indices of {8 * facts.index_bytes} bits on the model's device: {100 * share:g} % of "
        f"a 16-bit KV cache; {facts.centroids} centroids, {shared} of a KV head"
    )
