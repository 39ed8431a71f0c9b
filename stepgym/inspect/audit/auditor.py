"""The audit itself: reads a store shard by shard and runs every check that it has the means for."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from stepgym.errors import UserError
from stepgym.inspect.audit import checks as _registered  # noqa: F401  (registers them)
from stepgym.inspect.audit.check import CHECKS, Check, Fault, Level, Need
from stepgym.inspect.audit.checks.model import LOGPROB_GAP
from stepgym.inspect.audit.checks.records import DUPLICATE
from stepgym.inspect.audit.context import tokens_in_context
from stepgym.inspect.audit.finding import SEVERITIES, Audit, CheckResult, Finding, Severity
from stepgym.inspect.audit.gap import GapOptions, LogprobGap, measure_gap
from stepgym.inspect.audit.models import find_models
from stepgym.inspect.audit.rendering import Renderings
from stepgym.inspect.audit.rows import BadRow, read_rows
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import GroupView, Member, RunFacts, StepView, TrajectoryView
from stepgym.inspect.recorded_run import RecordedRun
from stepgym.record.shard import list_shards
from stepgym.record.trajectory import Trajectory, TrajectoryId

NO_TOKENIZER = "no tokenizer: the run has no renderer/ folder, and none was given (--tokenizer PATH)"
NO_MODEL = "no model was given (--model PATH)"


def audit(
    path: str | os.PathLike[str],
    *,
    phases: str | Collection[str] = (),
    tokenizer: str | os.PathLike[str] | None = None,
    model: GapOptions | None = None,
    limit: int = 20,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Check every promise that can be checked from what a run has stored.

    Args:
        path: A run's folder, or a folder of Parquet shards.
        phases: Only trajectories of these phases; all where none are named.
        tokenizer: A folder or hub name of the model's tokenizer; by default the run's own `renderer/` folder.
            Without either, checks that need one are skipped, and the audit says so.
        model: The model whose logprobs are compared with those that were recorded; None compares none.
        limit: Most findings that are kept of each check: the worst, and the first of those. All are counted.
        progress: Called with the number of trajectories read so far.

    Raises:
        UserError: There is no such run, it holds no trajectories, a shard cannot be read, or the tokenizer or the
            model cannot be loaded.
    """
    started = time.perf_counter()
    phases = (phases,) if isinstance(phases, str) else tuple(phases)
    run = RecordedRun.of(path)
    run.store().close()  # what is no store, or one of another version, is refused here
    facts = RunFacts(run.config, tuple(_metrics(run.path)))
    renderings = Renderings(_renderer(run, tokenizer))
    auditor = _Auditor(facts, renderings, limit)
    shards = list_shards(run.trajectories)
    for row in read_rows(shards, phases):
        auditor.look_at(row)
        if progress is not None and auditor.read % 64 == 0:
            progress(auditor.read)
    if not auditor.read:
        wanted = f" of phase {', '.join(sorted(phases))}" if phases else ""
        raise UserError(f"{run.trajectories}: no trajectories{wanted} in the store{_phases(run, phases)}")
    auditor.finish()
    gap: LogprobGap | None = None
    if model is not None:
        sampled = {version for versions in auditor.statistics.versions.values() for version in versions}
        models = find_models(run, model.model, model.weights_version, sampled)
        gap = measure_gap(lambda: _trajectories(shards, phases), models, model, renderings, limit, auditor.findings.add)
    return Audit(
        path=str(path),
        trajectories=auditor.statistics.trajectories,
        steps=auditor.statistics.steps,
        tokens=auditor.statistics.prompt_tokens + auditor.statistics.response_tokens,
        checks=tuple(auditor.results(without_gap=_without_gap(gap))),
        findings=tuple(auditor.findings.worst()),
        statistics=auditor.statistics.to_dict(),
        logprob_gap=gap,
        seconds=time.perf_counter() - started,
    )


class _Findings:
    """Counts all findings and keeps the worst of each check."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: dict[str, Counter[Severity]] = {}
        self._kept: dict[tuple[str, Severity], list[Finding]] = {}

    def wanted(self, name: str, severity: Severity) -> bool:
        """Whether one more finding of this kind would be kept."""
        return len(self._kept.get((name, severity), ())) < self.limit

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it while there is room."""
        self.counts.setdefault(finding.check, Counter())[finding.severity] += 1
        if self.wanted(finding.check, finding.severity):
            self._kept.setdefault((finding.check, finding.severity), []).append(finding)

    def worst(self) -> Iterator[Finding]:
        """What was kept: errors first, in the order of the checks, at most `limit` of each check."""
        left = dict.fromkeys(CHECKS, self.limit)
        for severity in SEVERITIES:
            for name in CHECKS:
                kept = self._kept.get((name, severity), [])[: left[name]]
                left[name] -= len(kept)
                yield from kept


class _Auditor:
    def __init__(self, facts: RunFacts, renderings: Renderings, limit: int) -> None:
        self.facts = facts
        self.renderings = renderings
        self.statistics = Statistics(facts, renderings.first)
        self.findings = _Findings(limit)
        self.members: dict[tuple[str, int, str], list[Member]] = {}
        self.read = 0
        self._seen: set[str] = set()
        self._unread: dict[tuple[str, int, str], set[int]] = {}
        self._hooks: dict[Level, list[tuple[Check, Any]]] = {
            level: [
                (each, each.hooks[level])
                for each in CHECKS.values()
                if level in each.hooks and self._can(each.need(level))
            ]
            for level in ("step", "trajectory", "group", "run")
        }

    def look_at(self, row: Trajectory | BadRow) -> None:
        """Check a row."""
        self.read += 1
        if isinstance(row, BadRow):
            for check, fault in row.faults:
                self.findings.add(Finding(check, fault.severity, row.id, fault.step, fault.token, fault.text))
            try:
                key = TrajectoryId.parse(row.id)
            except ValueError:
                return
            self._unread.setdefault(key.group, set()).add(key.sample)
            return
        name = str(row.id)
        if name in self._seen:
            self.findings.add(Finding(DUPLICATE, "error", name, None, None, "the store holds this trajectory twice"))
            return
        self._seen.add(name)
        view = TrajectoryView(row, self.facts, self.renderings.of(row.provenance))
        for each in view.steps:
            for made, hook in self._hooks["step"]:
                for fault in hook(each):
                    self._report(made, fault, each, name)
        for made, hook in self._hooks["trajectory"]:
            for fault in hook(view):
                step = view.steps[fault.step] if fault.step is not None else None
                self._report(made, fault, step, name)
        self.members.setdefault(row.id.group, []).append(self.statistics.add(view))

    def finish(self) -> None:
        """The checks of groups and of the whole run."""
        expected = self._expected()
        for (phase, iteration, task), members in sorted(self.members.items()):
            members.sort(key=lambda member: member.id)
            group = GroupView(
                f"{phase}/{iteration}/{task}",
                members,
                expected.get((phase, iteration)),
                self.facts,
                frozenset(self._unread.get((phase, iteration, task), ())),
            )
            self.statistics.add_group(group)
            for member in members:
                self.statistics.add_member(member)
            for check, hook in self._hooks["group"]:
                for fault in hook(group):
                    self._report(check, fault, None, group.name)
        for check, hook in self._hooks["run"]:
            for fault in hook(self.statistics):
                self._report(check, fault, None, "")

    def results(self, *, without_gap: str) -> Iterator[CheckResult]:
        """What every check came to; `without_gap` says why no logprobs were compared."""
        for check in CHECKS.values():
            counts = dict(self.findings.counts.get(check.name, {}))
            skipped, whole = "", True
            if check.name == LOGPROB_GAP:
                skipped = without_gap
            elif not self._can(check.needs):
                skipped = NO_TOKENIZER
            elif not all(self._can(need) for need in check.partly.values()):
                skipped, whole = f"in part: {NO_TOKENIZER}", False
            yield CheckResult(
                check=check.name,
                promise=check.promise,
                status="skipped" if skipped and whole else "findings" if counts else "ok",
                counts=counts,
                skipped=skipped,
            )

    def _can(self, need: Need) -> bool:
        return need != "tokenizer" or self.renderings.first is not None

    def _report(self, check: Check, fault: Fault, view: StepView | None, trajectory: str) -> None:
        context = fault.context
        shown = view is not None and fault.token is not None and self.findings.wanted(check.name, fault.severity)
        if shown and not context and view is not None and fault.token is not None:
            decode = view.rendering.decode if view.owner.rendering is not None else None
            context = tokens_in_context(view.step, fault.token, decode)
        step = fault.step if fault.step is not None or view is None else view.index
        where = fault.trajectory or trajectory
        self.findings.add(Finding(check.name, fault.severity, where, step, fault.token, fault.text, context))

    def _expected(self) -> dict[tuple[str, int], int]:
        """Samples that each group should have: the most that a group of the same batch has."""
        most: dict[tuple[str, int], int] = {}
        for (phase, iteration, _), members in self.members.items():
            samples = 1 + max(member.id.sample for member in members)
            most[phase, iteration] = max(samples, most.get((phase, iteration), 0))
        asked = self.facts.section("rollout").get("samples")
        if isinstance(asked, int):
            for (phase, iteration), samples in most.items():
                if phase in ("train", "rollout", "eval"):
                    most[phase, iteration] = max(asked, samples)
        return most


def _without_gap(gap: LogprobGap | None) -> str:
    """Why no logprobs were compared; empty where some were."""
    if gap is None:
        return NO_MODEL
    reasons = ", ".join(gap.not_compared) or "there is none"
    return "" if gap.tokens else f"no step could be compared with the model ({reasons})"


def _trajectories(shards: Sequence[Path], phases: Collection[str]) -> Iterator[Trajectory]:
    """Every trajectory once; rows that are none have been reported."""
    seen: set[str] = set()
    for row in read_rows(shards, phases):
        if not isinstance(row, BadRow) and str(row.id) not in seen:
            seen.add(str(row.id))
            yield row


def _renderer(run: RecordedRun, tokenizer: str | os.PathLike[str] | None) -> Any:
    from stepgym.model.renderer_files import SETTINGS, load_renderer

    if tokenizer is not None:
        return load_renderer(tokenizer)
    kept = run.path / "renderer"
    return load_renderer(kept) if (kept / SETTINGS).exists() else None


def _metrics(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a last line that was cut off by a kill
        if isinstance(row, dict):
            yield row


def _phases(run: RecordedRun, phases: Collection[str]) -> str:
    if not phases:
        return ""
    with run.store() as store:
        known = sorted({key.phase for key in store.ids()})
    return f"; it has {', '.join(known)}" if known else ""
