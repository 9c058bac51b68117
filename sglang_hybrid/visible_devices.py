"""GPUs that CUDA_VISIBLE_DEVICES selects, by their numbers or by UUIDs."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def selected(variable: str, uuids: Sequence[Collection[str]]) -> list[int | str]:
    """Return the position in ``uuids`` of each GPU that CUDA_VISIBLE_DEVICES (``variable``) selects, in its order.

    ``uuids`` has the UUIDs of each GPU: its own, and those of its MIG instances. As in CUDA, the beginning of a UUID
    stands for the UUID if no other begins so, and the first entry that is neither a GPU's number nor a UUID ends the
    list. A UUID that does not name exactly one GPU or instance is returned as it is written.
    """
    chosen: list[int | str] = []
    for entry in map(str.strip, variable.split(",")):
        if entry.isdecimal() and int(entry) < len(uuids):
            chosen.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            # drivers before R470 write an instance as MIG-<UUID of its GPU>/<GPU instance>/<compute instance>
            start = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
            found = [gpu for gpu, names in enumerate(uuids) for name in names if name.startswith(start)]
            chosen.append(found[0] if len(found) == 1 else entry)
        else:
            break
    return chosen
