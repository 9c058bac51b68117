"""The finding of one check, and the report of all findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    OK = "ok"
    ADVICE = "advice"  # a server works, and a change would make the server faster or safer
    PROBLEM = "problem"  # a server does not start, or does not use the GPU
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What one check found. ``to_do`` is one sentence of advice, empty only if the status is ok."""

    status: Status
    found: str
    to_do: str = ""
    measurements: Mapping[str, float] = field(default_factory=dict)  # names end with the unit

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.to_do == ""):
            raise ValueError(f"a finding that is {self.status} with the advice {self.to_do!r}")


def ok(found: str, **measurements: float) -> Finding:
    return Finding(Status.OK, found, measurements=measurements)


def advice(found: str, to_do: str, **measurements: float) -> Finding:
    return Finding(Status.ADVICE, found, to_do, measurements)


def problem(found: str, to_do: str) -> Finding:
    return Finding(Status.PROBLEM, found, to_do)


def skipped(why: str, to_do: str) -> Finding:
    return Finding(Status.SKIPPED, why, to_do)


@dataclass(frozen=True)
class Report:
    """Versions of software, and findings by the name of their check, in the order of the checks."""

    versions: Mapping[str, str | None]
    findings: Mapping[str, Finding]

    @property
    def exit_status(self) -> int:
        return int(any(finding.status is Status.PROBLEM for finding in self.findings.values()))

    def count(self, status: Status) -> int:
        return sum(finding.status is status for finding in self.findings.values())

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints, as ``main.SCHEMA`` describes it."""
        return {
            "versions": dict(self.versions),
            "checks": [
                {"name": name, "status": finding.status.value, "found": finding.found, "to_do": finding.to_do or None}
                for name, finding in self.findings.items()
            ],
            "measurements": {
                key: value for finding in self.findings.values() for key, value in finding.measurements.items()
            },
        }
