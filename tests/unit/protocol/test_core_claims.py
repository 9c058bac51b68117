"""Workers on one host agree on cores by file locks, which end with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.protocol import core_claims
from sglang_hybrid.protocol.core_claims import CoreClaims, taken_cpus
from sglang_hybrid.protocol.cores import Core, CoresError, Placement, Topology

SIXTEEN = Topology(tuple(Core((cpu,)) for cpu in range(16)))
HOLDER = """
import sys, time
from pathlib import Path
from sglang_hybrid.protocol.core_claims import CoreClaims
from sglang_hybrid.protocol.cores import Core, Topology
claims = CoreClaims(Path(sys.argv[1]))
print(claims.claim(Topology(tuple(Core((cpu,)) for cpu in range(16))), "0-7", 0, 0)[0].threads, flush=True)
time.sleep(600)
"""


def test_the_second_worker_takes_what_the_first_left(tmp_path: Path) -> None:
    first, second, third = (CoreClaims(tmp_path / "claims") for _ in range(3))
    placed, taken = first.claim(SIXTEEN, "auto", 8, 0)
    assert (placed.cores, taken) == (tuple(range(1, 9)), frozenset())
    placed, taken = second.claim(SIXTEEN, "auto", 0, 0)
    assert (placed.cores, taken) == (tuple(range(9, 15)), frozenset(range(1, 9)))
    # two cores are left: too few to bind anybody
    assert third.claim(SIXTEEN, "auto", 0, 0) == (Placement(1, 1), frozenset(range(1, 15)))
    assert taken_cpus(range(16), tmp_path / "claims") == frozenset(range(1, 15))


def test_listed_cores_are_had_and_whoever_has_them_too_is_told(tmp_path: Path) -> None:
    first, second = CoreClaims(tmp_path / "claims"), CoreClaims(tmp_path / "claims")
    first.claim(SIXTEEN, "0-7", 0, 0)
    placed, taken = second.claim(SIXTEEN, "4-11", 0, 0)
    assert placed.cores == tuple(range(4, 12))
    assert taken.intersection(placed.cores) == {4, 5, 6, 7}
    # now each worker has cores of its own
    assert second.claim(SIXTEEN, "8-15", 0, 0)[0].cores == tuple(range(8, 16))
    assert taken_cpus(range(16), tmp_path / "claims") == frozenset(range(16))


def test_a_new_plan_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    claims = CoreClaims(tmp_path / "claims")
    assert claims.claim(SIXTEEN, "0-3", 0, 0)[1] == claims.claim(SIXTEEN, "2-5", 0, 0)[1] == frozenset()
    with pytest.raises(CoresError):
        claims.claim(SIXTEEN, "0-99", 0, 0)
    assert taken_cpus(range(16), tmp_path / "claims") == {2, 3, 4, 5}
    claims.claim(SIXTEEN, "none", 0, 0)
    assert taken_cpus(range(16), tmp_path / "claims") == frozenset()


def test_cores_of_a_killed_worker_are_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "claims")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "8\n"
        try:
            assert taken_cpus(range(16), tmp_path / "claims") == frozenset(range(8))
            mine = CoreClaims(tmp_path / "claims")
            assert mine.claim(SIXTEEN, "auto", 0, 0)[0].cores == tuple(range(9, 15))
        finally:
            process.send_signal(signal.SIGKILL)
    assert mine.claim(SIXTEEN, "auto", 0, 0)[0].cores == tuple(range(1, 13))


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first, second = CoreClaims(tmp_path / "claims"), CoreClaims(tmp_path / "claims")
    for _ in range(3):
        first.claim(SIXTEEN, "auto", 0, 0)
        second.claim(SIXTEEN, "0-15", 0, 0)
        taken_cpus(range(16), tmp_path / "claims")
    first.release()
    second.release()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["link", "mode", "file"])
def test_a_directory_that_others_could_use_is_not_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "claims"
    if kind == "link":
        (tmp_path / "else").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "else")
    elif kind == "mode":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.write_text("")
    claims = CoreClaims(place)
    assert claims.claim(SIXTEEN, "auto", 0, 0)[0].cores == tuple(range(1, 13))
    assert "workers cannot agree on cores" in caplog.text
    assert taken_cpus(range(16), place) == frozenset()


def test_a_worker_that_never_ends_choosing_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_claims, "_CHOOSING_SECONDS", 0.05)
    stuck = CoreClaims(tmp_path / "claims")
    stuck.claim(SIXTEEN, "none", 0, 0)
    with core_claims._opened(tmp_path / "claims") as folder, core_claims._choosing(folder):
        assert CoreClaims(tmp_path / "claims").claim(SIXTEEN, "auto", 0, 0)[0].threads == 12
    assert "has been choosing" in caplog.text


def test_looking_makes_nothing(tmp_path: Path) -> None:
    assert taken_cpus(range(4), tmp_path / "claims") == frozenset()
    assert not (tmp_path / "claims").exists()
