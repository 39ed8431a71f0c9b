"""`stepgym audit`: every promise that can be checked from what a run has stored, checked.

`audit(path)` reads a run shard by shard and returns an `Audit`: the result of each check, the worst findings with
trajectory, step and token position, and figures about the run. `CHECKS` is the registry of checks.
"""

from __future__ import annotations

from stepgym.inspect.audit.auditor import audit
from stepgym.inspect.audit.check import CHECKS
from stepgym.inspect.audit.finding import Audit, CheckResult, Finding
from stepgym.inspect.audit.gap import GapOptions, LogprobGap

__all__ = ["CHECKS", "Audit", "CheckResult", "Finding", "GapOptions", "LogprobGap", "audit"]
