"""What the checks of an environment found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: Name of the check.
        level: `ok`, `warning` (works, but will surprise somebody) or `error` (a promise is broken).
        message: One line.
    """

    check: str
    level: Level
    message: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What all checks found, in the order in which they ran."""

    env: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """The broken promises."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """What works, but will surprise somebody."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"env": self.env, "ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        return "\n".join(f"{finding.level:<8} {finding.check:<12} {finding.message}" for finding in self.findings)


class BrokenPromiseError(Exception):
    """A check found a broken promise."""


class SurpriseError(Exception):
    """A check found something that works, but will surprise somebody."""
