"""Results as tables for the terminal. The same numbers as JSON come from the results' own `to_dict`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.run.comparison import Comparison, Difference
from stepgym.run.resampling import Interval
from stepgym.run.statistics import Evaluation


def evaluation_table(evaluation: Evaluation, *, title: str = "") -> Table:
    """One row per measure: its name, its value, and what there is to know about it."""
    table = _table(title, "measure", "value", "")
    table.add_row("success", _share(evaluation.success), _wide(evaluation.success_ci95, share=True))
    table.add_row("mean reward", _number(evaluation.mean_reward), _wide(evaluation.ci95))
    for k in _shown(evaluation.pass_at):
        tasks = evaluation.pass_at_tasks[k]
        short = f"over the {tasks} of {evaluation.tasks} tasks with {k} episodes" if tasks < evaluation.tasks else ""
        table.add_row(f"pass@{k}", _share(evaluation.pass_at[k]), short)
    table.add_row("episodes", str(evaluation.episodes), f"of {evaluation.tasks} tasks")
    table.add_row("outcomes", str(sum(evaluation.outcomes.values())), _counts(evaluation.outcomes))
    if evaluation.excluded or evaluation.missing:
        counts = _counts({**evaluation.excluded, **({"missing": evaluation.missing} if evaluation.missing else {})})
        table.add_row("not counted", str(sum(evaluation.excluded.values()) + evaluation.missing), counts)
    if evaluation.unscorable_tasks:
        names = ", ".join(evaluation.unscorable_tasks[:5])
        more = len(evaluation.unscorable_tasks) - 5
        table.add_row(
            "unscorable tasks", str(len(evaluation.unscorable_tasks)), names + (f" and {more} more" if more > 0 else "")
        )
    if evaluation.failed_attempts:
        table.add_row("tried again", str(sum(evaluation.failed_attempts.values())), _counts(evaluation.failed_attempts))
    table.add_row("turns", str(evaluation.turns), f"{_number(evaluation.turns_mean, 2)} per episode")
    table.add_row(
        "action errors",
        str(evaluation.action_errors),
        f"{_share(evaluation.action_error_rate)} of turns; {_share(evaluation.malformed_rate)} malformed",
    )
    table.add_row(
        "tokens sampled",
        f"{evaluation.response_tokens:,}",
        f"{_number(evaluation.response_tokens_mean, 1)} per episode",
    )
    table.add_row(
        "tokens sent", f"{evaluation.prompt_tokens:,}", f"{_number(evaluation.prompt_tokens_mean, 1)} per episode"
    )
    table.add_row("wall time", f"{evaluation.wall_s:,.1f} s", "")
    if evaluation.incomplete:
        failed = sum(n for name, n in evaluation.excluded.items() if name != "unscorable") + evaluation.missing
        table.caption = (
            f"INCOMPLETE: {failed} of {evaluation.episodes + failed} episodes failed or are missing (more than 2 %)"
        )
    return table


def comparison_table(comparison: Comparison, *, a: str = "", b: str = "") -> Table:
    """Success and reward of both sides over the tasks that both have; below it the verdict, and what A and B are."""
    table = _table("", "measure", "A", "B", "difference", "95 % interval", "p")
    table.add_row("success", *_difference(comparison.success, share=True))
    table.add_row("reward", *_difference(comparison.reward, share=False))
    notes = [f"{comparison.verdict}."]
    notes.append(f"The difference in reward is {comparison.reward.verdict}.")
    left_out = {"only in A": comparison.only_a, "only in B": comparison.only_b, "changed": comparison.changed}
    if any(left_out.values()):
        notes.append("Tasks left out: " + _counts({name: count for name, count in left_out.items() if count}))
    if comparison.incomplete:
        notes.append("INCOMPLETE: more than 2 % of the episodes of a side failed or are missing")
    notes += [f"{name}: {path}" for name, path in (("A", a), ("B", b)) if path]
    table.caption = "\n".join(notes)
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title or None, title_justify="left", caption_justify="left")
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position and head else "left")
    return table


def _difference(difference: Difference, *, share: bool) -> tuple[str, ...]:
    show = _share if share else _number
    sign = "+" if difference.difference > 0 else ""
    return (
        show(difference.a),
        show(difference.b),
        sign + show(difference.difference),
        _interval(difference.ci95, share=share),
        f"{difference.p_value:.2g}",
    )


def _shown(pass_at: Mapping[int, float]) -> list[int]:
    """The powers of two and the largest k: the others are in the JSON."""
    return [k for k in pass_at if k & (k - 1) == 0 or k == max(pass_at)]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _interval(interval: Interval | None, *, share: bool = False) -> str:
    if interval is None:
        return "–"
    show = _share if share else _number
    return f"{show(interval[0])} to {show(interval[1])}"


def _wide(interval: Interval | None, *, share: bool = False) -> str:
    if interval is None:
        return "no interval: it takes two tasks"
    return f"{_interval(interval, share=share)} (95 % interval over tasks)"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def policy_table(policy: OutcomePolicy) -> Table:
    """One row per outcome: whose fault it is and what training does about it."""
    table = _table("what training does with each outcome", "outcome", "fault", "treatment")
    for outcome in Outcome:
        treatment = policy[outcome]
        parts = [f"tried again {treatment.retries} times"] if treatment.retries else []
        if treatment.train:
            reward = treatment.reward
            parts.append({"keep": "reward kept", "lowest": "lowest reward"}.get(str(reward), f"reward {reward}"))
        else:
            parts.append("masked" if treatment.on_exhausted == "mask" else "dropped")
        table.add_row(str(outcome), str(outcome.fault), ", then ".join(parts))
    return table
