"""What an audit found: findings, the result of each check, and the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stepgym.errors import UserError

if TYPE_CHECKING:
    from stepgym.inspect.audit.gap import LogprobGap

Severity = Literal["error", "warning", "note"]
Status = Literal["ok", "findings", "skipped"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that one check found.

    Attributes:
        check: Name of the check.
        severity: `error` (a promise is broken), `warning` (works, and will surprise somebody) or `note`.
        trajectory: The trajectory's id; `phase/iteration/task` for a group, empty for the run as a whole.
        step: Index of the step; None where it is about more than one.
        token: Position in the step's prompt + response; None where it is about no single token.
        text: One sentence.
        context: The tokens around that position, as text, the token between `⟦` and `⟧`; empty without one.
    """

    check: str
    severity: Severity
    trajectory: str
    step: int | None
    token: int | None
    text: str
    context: str = ""

    @property
    def place(self) -> str:
        """Where it is, in one line."""
        parts = [self.trajectory or "the run"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.token is not None:
            parts.append(f"token {self.token}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check came to.

    Attributes:
        check: Its name.
        promise: What it checks, in one sentence.
        status: `ok`, `findings` or `skipped`.
        counts: Number of findings by severity, all of them, shown or not.
        skipped: Why it did not run, or not all of it (`in part: …`); empty where it did.
    """

    check: str
    promise: str
    status: Status
    counts: Mapping[Severity, int] = field(default_factory=dict)
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {**asdict(self), "counts": dict(self.counts)}


@dataclass(frozen=True, slots=True)
class Audit:
    """An audit of a run.

    Attributes:
        path: What was audited.
        trajectories, steps, tokens: How many were read; tokens are those of every prompt and response.
        checks: The result of every check, in their order.
        findings: The worst findings of every check, errors first; of each check at most as many as were asked for.
        statistics: Figures about the run, by name.
        logprob_gap: Sampled against recomputed logprobs; None where no model was given.
        seconds: How long it took.
    """

    path: str
    trajectories: int
    steps: int
    tokens: int
    checks: Sequence[CheckResult]
    findings: Sequence[Finding]
    statistics: Mapping[str, Any]
    logprob_gap: LogprobGap | None
    seconds: float

    def count(self, severity: Severity) -> int:
        """Number of findings of a severity, over all checks."""
        return sum(result.counts.get(severity, 0) for result in self.checks)

    def failed(self, fail_on: str) -> list[CheckResult]:
        """The checks that a gate stops at.

        Args:
            fail_on: `error`, `warning` (which means errors too), `note`, names of checks, or several of these with
                commas between them. A check that is named fails with any finding, and when it or a part of it was
                skipped: what was not looked at has not passed.

        Raises `UserError` for a name that is no check's.
        """
        wanted = parse_gate(fail_on, [result.check for result in self.checks])
        bad = SEVERITIES[: max((SEVERITIES.index(each) + 1 for each in SEVERITIES if each in wanted), default=0)]
        return [
            result
            for result in self.checks
            if any(result.counts.get(severity) for severity in bad)
            or (result.check in wanted and (result.status != "ok" or result.skipped))
        ]

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON."""
        return {
            "path": self.path,
            "trajectories": self.trajectories,
            "steps": self.steps,
            "tokens": self.tokens,
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "checks": [result.to_dict() for result in self.checks],
            "findings": [finding.to_dict() for finding in self.findings],
            "statistics": dict(self.statistics),
            "logprob_gap": self.logprob_gap.to_dict() if self.logprob_gap is not None else None,
            "seconds": self.seconds,
        }


def parse_gate(text: str, known: Sequence[str]) -> list[str]:
    """What closes a gate: severities and names of checks. Raises `UserError` for what is neither, with a suggestion."""
    from difflib import get_close_matches

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known and name not in SEVERITIES:
            close = get_close_matches(name, [*known, *SEVERITIES], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: error, warning, note, {', '.join(known)}"
            raise UserError(f"audit: there is no check {name!r}; {hint}")
    if not names:
        raise UserError("audit: --fail-on takes error, warning, note, or names of checks with commas between them")
    return names
