"""Running totals of a rollout, for progress displays and summaries."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from stepgym.record.outcome import Fault, OutcomePolicy
from stepgym.record.trajectory import Trajectory


@dataclass(slots=True)
class Tally:
    """Counts of what has ended so far.

    Attributes:
        planned: Episodes asked for; 0 where unknown.
        episodes: Final episodes, resumed ones included.
        attempts: All attempts of this run, failed ones included.
        outcomes: Number of final episodes by outcome.
        failed_attempts: Number of attempts that failed and were tried again, by outcome.
        scored, reward_sum, successes: Over the final episodes that could be scored.
        turns, response_tokens: Over all attempts.
        suspects: One line for each failure that came back on a retry.
    """

    planned: int = 0
    episodes: int = 0
    attempts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failed_attempts: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    reward_sum: float = 0.0
    successes: int = 0
    turns: int = 0
    response_tokens: int = 0
    suspects: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    recent_faults: deque[Fault] = field(default_factory=deque)

    def add(self, trajectory: Trajectory, *, resumed: bool = False) -> None:
        """Count one attempt."""
        if not resumed:
            self.attempts += 1
            self.recent_faults.append(trajectory.outcome.fault)
            self.turns += len(trajectory.steps)
            self.response_tokens += int(trajectory.metrics.get("response_tokens", 0))
        if not trajectory.final:
            self.failed_attempts[str(trajectory.outcome)] += 1
            return
        self.episodes += 1
        self.outcomes[str(trajectory.outcome)] += 1
        if trajectory.reward is not None:
            self.scored += 1
            self.reward_sum += trajectory.reward
            self.successes += bool(trajectory.success)

    @property
    def mean_reward(self) -> float:
        """Over the episodes that could be scored; NaN before the first."""
        return self.reward_sum / self.scored if self.scored else float("nan")

    @property
    def success(self) -> float:
        """Share of successes among the episodes that could be scored; NaN before the first."""
        return self.successes / self.scored if self.scored else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second since the tally was made."""
        return self.response_tokens / max(1e-9, time.perf_counter() - self.started)

    def infrastructure_share(self, policy: OutcomePolicy) -> float:
        """Share of infrastructure faults in the policy's window of latest attempts; 0 until a fifth of it is full."""
        while len(self.recent_faults) > policy.window:
            self.recent_faults.popleft()
        if len(self.recent_faults) * 5 < policy.window:
            return 0.0
        return self.recent_faults.count(Fault.INFRASTRUCTURE) / len(self.recent_faults)
