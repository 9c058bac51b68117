"""A directory that is either absent or complete, built once by whichever process comes first.

Next to each other on one file system:

    models/
        .NAME.lock          held (flock) while a process builds; the kernel frees it when that process dies
        .NAME.building-*    work in progress; whoever holds the lock may delete any of these
        .NAME.replaced-*    the previous build, on its way out
        NAME/               appears by rename, complete
            conversion.json the marker: what it was built from, and the size of every file
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.model.errors import DefaultModelError

MARKER = "conversion.json"

Identity = dict[str, Any]
Report = Callable[[str], None]


def build_once(target: Path, identity: Identity, build: Callable[[Path], None], report: Report) -> Path:
    """Make `target` hold what `build` writes for `identity`, and return it.

    `build` gets an empty directory on the same file system. If it raises, `target` is as it was before.
    A `target` of another identity is replaced; one that carries no marker is somebody else's and is refused.
    """
    if is_complete(target, identity):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, report):
            if is_complete(target, identity):  # built by the process that held the lock
                return target
            _refuse_to_replace_a_foreign_directory(target)
            _remove_leftovers(target)
            _build_and_publish(target, identity, build)
    except OSError as error:
        raise DefaultModelError(
            f"Cannot write the converted model to {target}: {error}. Choose another place with --cache-dir "
            "or the environment variable SGLANG_HYBRID_CACHE."
        ) from error
    return target


def is_complete(target: Path, identity: Identity) -> bool:
    """Return True if `target` was built for `identity` and still has every file at its full size."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
        return bool(marker["identity"] == identity) and all(
            (target / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build_and_publish(target: Path, identity: Identity, build: Callable[[Path], None]) -> None:
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    try:
        build(building)
        files = {path.name: path.stat().st_size for path in sorted(building.iterdir())}
        marker = json.dumps({"identity": identity, "files": files}, indent=2)
        (building / MARKER).write_text(marker + "\n", encoding="utf-8")
        for path in building.iterdir():
            path.chmod(0o644)
            _flush_to_disk(path)  # or a power cut could leave the rename without the data
        # mkdtemp makes 0700 and safetensors 0600, which would hide the model from other users of a shared cache.
        building.chmod(0o755)
        if target.exists():
            # rename cannot replace a directory that has files. A server that reads the old one keeps its open files.
            target.rename(building.with_name(building.name.replace(".building-", ".replaced-")))
        building.rename(target)
        _flush_to_disk(target.parent)
    finally:
        _remove_leftovers(target)


def _refuse_to_replace_a_foreign_directory(target: Path) -> None:
    if target.exists() and not (target / MARKER).is_file():
        if target.is_dir() and not any(target.iterdir()):
            return
        raise DefaultModelError(
            f"{target} exists and was not made by this converter (it has no {MARKER}), so it is left alone. "
            "Remove it or choose another directory."
        )


def _remove_leftovers(target: Path) -> None:
    """Remove directories of interrupted builds. Hold the lock, so that no other process works in one of them."""
    for kind in ("building", "replaced"):
        for path in target.parent.glob(f".{escape(target.name)}.{kind}-*"):
            shutil.rmtree(path)


@contextmanager
def _locked(target: Path, report: Report) -> Iterator[None]:
    # The lock file stays: deleting it would let a newcomer lock a new file while an old waiter gets the deleted one.
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is building {target.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
