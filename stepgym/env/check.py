"""Checks that an environment keeps the promises of `Env`: Gymnasium's own checks, and ours."""

from __future__ import annotations

import inspect
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stepgym.config import config_model, keyword_parameters, to_jsonable
from stepgym.env.base import Env
from stepgym.env.findings import BrokenPromiseError, CheckReport, Finding, SurpriseError
from stepgym.env.garbage import garbage
from stepgym.env.messages import Message, tool_call
from stepgym.env.player import Player, has_expert, picked
from stepgym.env.registry import env_class, make
from stepgym.env.resources import Resources, left_behind, private_temporary_folder
from stepgym.env.shared import close_shared
from stepgym.env.worker import run_blocking, threads


def check_env(
    env: str | type[Env],
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    tasks_per_split: int = 3,
    step_timeout: float = 30.0,
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Check an environment.

    Args:
        env: Its id, short name, `module:Class`, or the class.
        config: Its config.
        seed: Seeds the episodes that are played.
        tasks_per_split: How many tasks of each split the expert plays.
        step_timeout: Seconds that a reset or a step may take; one that takes longer counts as hung.
        progress: Called with the name of each check before it runs.

    Returns:
        A report with one finding per check, `ok` included, or several where several things are wrong.

    Raises:
        UserError: There is no such environment, or the config does not fit it.
    """
    cls = env_class(env) if isinstance(env, str) else env
    make(cls, **dict(config or {})).close()
    checker = _Checker(cls, dict(config or {}), seed, tasks_per_split, step_timeout)
    findings: list[Finding] = []
    close_shared(cls)
    with private_temporary_folder() as temporary:
        try:
            for name, check in checker.checks(temporary):
                if progress is not None:
                    progress(name)
                findings += _run(name, check)
        finally:
            close_shared(cls)
    return CheckReport(env if isinstance(env, str) else f"{cls.__module__}:{cls.__qualname__}", tuple(findings))


def _run(name: str, check: Callable[[], str]) -> list[Finding]:
    try:
        return [Finding(name, "ok", check())]
    except SurpriseError as warned:
        return [Finding(name, "warning", line) for line in warned.args]
    except BrokenPromiseError as failed:
        return [Finding(name, "error", line) for line in failed.args]
    except Exception as error:
        return [Finding(name, "error", _line(error))]


def _line(error: BaseException) -> str:
    """An exception as one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


class _Checker(Player):
    """The checks: each returns what it found in order, or raises what is wrong."""

    def checks(self, temporary: Callable[[], list[str]]) -> Iterator[tuple[str, Callable[[], str]]]:
        """All checks by name. `close` begins when the first one does, so it comes as a pair around the others."""
        run_blocking(threads.run(int))  # the library's own threads are no leak
        before = Resources.now()
        yield "config", self.config_fields
        yield "tasks", self.task_tables
        yield "tools", self.tools
        yield "gymnasium", self.gymnasium
        yield "seeds", self.seeds
        yield "concurrent", self.concurrent
        yield "expert", self.expert
        yield "max_turns", self.max_turns
        yield "garbage", self.garbage
        yield "constructor", self.constructor
        yield "close", lambda: self.close(before, temporary)

    def config_fields(self) -> str:
        """The constructor's parameters can be a config."""
        config_model(self.cls)
        parameters = list(inspect.signature(self.cls.__init__).parameters.values())[1:]
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if positional:
            raise BrokenPromiseError(
                f"the constructor's parameters must be keyword-only (after a *): {', '.join(positional)}"
            )
        fields = keyword_parameters(self.cls)
        untyped = [name for name, parameter in fields.items() if parameter.annotation is parameter.empty]
        if untyped:
            raise SurpriseError(f"fields without a type hint are not checked: {', '.join(untyped)}")
        with self.made() as env:
            json.dumps(to_jsonable(env.config), allow_nan=False)
            low, high = env.reward_range
            if not low < high:
                raise BrokenPromiseError(f"reward_range must be (low, high) with low < high, not {env.reward_range}")
        return f"{len(fields)} fields"

    def task_tables(self) -> str:
        """Ids are unique, tasks are JSON and the same on every look, splits share none."""
        counts: list[str] = []
        seen: dict[str, str] = {}
        shared: dict[str, int] = {}
        with self.made() as env:
            for split in env.splits:
                table = self.table(env, split)
                if len(table) == 0:
                    raise BrokenPromiseError(f"the split {split!r} has no tasks")
                some, again = picked(table), self.tasks(env, split)
                ids = [task.id for task in some]
                if len(set(ids)) < len(ids):
                    doubled = next(task_id for task_id in ids if ids.count(task_id) > 1)
                    raise BrokenPromiseError(f"the split {split!r} has two tasks with the id {doubled!r}")
                if some != again:
                    raise BrokenPromiseError(f"the split {split!r} has other tasks on a second look")
                for task in some:
                    try:
                        json.dumps(task.to_dict(), allow_nan=False)
                    except (TypeError, ValueError) as error:
                        raise BrokenPromiseError(
                            f"the task {task.id!r} of the split {split!r} is not JSON: {error}"
                        ) from None
                    other = seen.setdefault(task.id, split)
                    if other != split:
                        shared[f"{other} and {split}"] = shared.get(f"{other} and {split}", 0) + 1
                counts.append(f"{split} {len(table)}")
        if shared:
            raise SurpriseError(
                *(f"{pair} share tasks ({count} ids of those looked at)" for pair, count in shared.items())
            )
        return ", ".join(counts)

    def tools(self) -> str:
        """The tools' schemas are valid JSON Schema in the OpenAI format."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError

        silent: list[str] = []
        with self.begun() as (env, _):
            names: set[str] = set()
            for tool in env.tools:
                json.dumps(tool, allow_nan=False)
                function = tool.get("function")
                if tool.get("type") != "function" or not isinstance(function, Mapping):
                    raise BrokenPromiseError(
                        f'a tool is {{"type": "function", "function": {{...}}}}, not {tool!r:.100}'
                    )
                name = function.get("name")
                if not isinstance(name, str) or not name.replace("-", "_").isidentifier() or len(name) > 64:
                    raise BrokenPromiseError(f"a tool's name has up to 64 letters, digits, _ and -, not {name!r:.100}")
                if name in names:
                    raise BrokenPromiseError(f"two tools are called {name!r}")
                names.add(name)
                parameters = function.get("parameters", {"type": "object"})
                if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
                    raise BrokenPromiseError(f"{name}: the parameters must be a JSON Schema of the type 'object'")
                try:
                    Draft202012Validator.check_schema(parameters)
                except SchemaError as error:
                    raise BrokenPromiseError(
                        f"{name}: the parameters are not a valid JSON Schema: {error.message}"
                    ) from None
                if not function.get("description"):
                    silent.append(name)
        if silent:
            raise SurpriseError(f"tools without a description: {', '.join(silent)}")
        return f"{len(names)} tools" if names else "no tools"

    def gymnasium(self) -> str:
        """Gymnasium's own checker passes."""
        import gymnasium
        from gymnasium.utils.env_checker import check_env as gymnasium_check

        with self.made() as env, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gymnasium_check(env, skip_render_check=True)
        texts = [str(warning.message) for warning in caught]
        if texts:
            raise SurpriseError(*(" ".join(text.replace("\x1b[33mWARN: ", "").split())[:300] for text in texts))
        return f"gymnasium {gymnasium.__version__} is content"

    def seeds(self) -> str:
        """The same seed and actions give the same episode; the same seed draws the same task."""
        with self.made() as env:
            first = self.reset(env, {})[1]
            if self.reset(env, {})[1] != first:
                raise BrokenPromiseError("the same seed draws different tasks")
        for task in self.some_tasks():
            one, two = self.transcript(task), self.transcript(task)
            for turn, (a, b) in enumerate(zip(one, two, strict=False)):
                if a != b:
                    raise BrokenPromiseError(
                        f"task {task.id!r}, turn {turn}: the same seed gave {a!r:.150} and then {b!r:.150}"
                    )
            if len(one) != len(two):
                raise BrokenPromiseError(
                    f"task {task.id!r}: the same seed gave {len(one) - 1} and then {len(two) - 1} turns"
                )
        return "the same seed gives the same episode"

    def concurrent(self) -> str:
        """Two episodes at the same time do not disturb each other."""
        tasks = (self.some_tasks() * 2)[:2]
        alone = [self.transcript(task) for task in tasks]
        plays = [self.play(task) for task in tasks]
        together: list[list[Any]] = [[], []]
        running = [0, 1]
        while running:
            for index in list(running):
                try:
                    together[index].append(next(plays[index])[:3])
                except StopIteration:
                    running.remove(index)
        for task, one, other in zip(tasks, alone, together, strict=True):
            if one != other:
                raise BrokenPromiseError(
                    f"task {task.id!r} went differently beside another episode: is there state on the class?"
                )
        return "episodes do not disturb each other"

    def expert(self) -> str:
        """The environment's own expert succeeds, within the limits that the environment names."""
        played = 0
        with self.made() as env:
            if not has_expert(env):
                raise SurpriseError("the environment has no expert: nothing shows that its tasks can be solved")
            splits = {split: self.tasks(env, split, self.tasks_per_split) for split in env.splits}
        for split, tasks in splits.items():
            for task in tasks:
                where = f"split {split!r}, task {task.id!r}"
                events = list(self.play(task))
                for *_, info in events:
                    # A well-formed action that fails may be part of a demonstration; one that is no action may not.
                    if info.get("action_status", "ok") != "ok":
                        raise BrokenPromiseError(f"{where}: the expert's action is refused: {info['action_error']}")
                _, reward, over, info = events[-1]
                if not over:
                    raise BrokenPromiseError(f"{where}: the expert has no more messages, and the episode is not over")
                if not info.get("success"):
                    raise BrokenPromiseError(f"{where}: the expert does not succeed (last reward {reward})")
                played += 1
        return f"succeeds in {played} tasks"

    def max_turns(self) -> str:
        """No episode is longer than `max_turns`, and the last turn says so."""
        with self.begun() as (env, _):
            limit = env.max_turns
            if not isinstance(limit, int) or limit < 1:
                raise BrokenPromiseError(f"max_turns must be a whole number from 1, not {limit!r}")
            idle: Message | str = tool_call("no_such_tool") if env.tools else "hm"
            for _ in range(limit):
                _, _, terminated, truncated, info = self.step(env, idle)
                if terminated or truncated:
                    break
            else:
                raise BrokenPromiseError(f"the episode went on after {limit} turns")
            if "success" not in info:
                raise BrokenPromiseError("info has no 'success' at the end of an episode")
        return f"at most {limit}"

    def garbage(self) -> str:
        """Every kind of garbage is answered, at the first turn and later, and never raises."""
        count = 0
        with self.begun() as (env, task):
            actions = list(garbage(env.tools, env.stop))
            for action in actions:
                if env._over:
                    self.reset(env, {"task": task})
                    # Every other episode begins with a turn of the expert's, so that garbage meets a later state too.
                    first = next(self.script(env, task), None) if count % 2 else None
                    if first is not None and self.step(env, first)[2:4] != (False, False):
                        self.reset(env, {"task": task})
                count += 1
                try:
                    observation, _, terminated, truncated, _ = self.step(env, action)
                except Exception as error:
                    raise BrokenPromiseError(f"the action {action!r:.150} raised {_line(error)}") from None
                if not observation and not (terminated or truncated):
                    raise BrokenPromiseError(f"the action {action!r:.150} got no answer, and the episode went on")
        return f"{count} actions answered"

    def constructor(self) -> str:
        """Making an environment is cheap: one is made for every episode."""
        times: list[float] = []
        for _ in range(20):
            start = time.perf_counter()
            env = self.cls(**self.arguments)
            times.append(time.perf_counter() - start)
            env.close()
        milliseconds = statistics.median(times) * 1000
        if milliseconds > 1.0:
            raise SurpriseError(f"takes {milliseconds:.1f} ms, over 1 ms: open what is heavy in open_shared")
        return f"takes {milliseconds:.3f} ms"

    def close(self, before: Resources, temporary: Callable[[], list[str]]) -> str:
        """Closing an environment frees what its episodes took; closing what is shared frees the rest."""
        task = self.some_tasks()[0]
        for _ in self.play(task):
            pass
        warm, files = Resources.now(), len(temporary())
        episodes = 10
        for episode in range(episodes):
            with self.made() as env:
                self.reset(env, {"task": task})
                for action in self.script(env, task) if episode % 2 else ():
                    if self.step(env, action)[2:4] != (False, False):
                        break
                env.close()  # and again by `made`: closing twice is allowed
        # What is shared may grow a little with use (one more worker); what episodes leave behind grows with each.
        left = left_behind(warm)
        if len(left) >= episodes // 2:
            raise BrokenPromiseError(f"{episodes} closed episodes left behind {len(left)} things, such as {left[0]}")
        if len(temporary()) - files >= episodes // 2:
            raise BrokenPromiseError(
                f"{episodes} closed episodes left {len(temporary()) - files} temporary files behind"
            )
        close_shared(self.cls)
        left = left_behind(before) + [f"temporary file {name}" for name in temporary()]
        if left:
            raise BrokenPromiseError(*(f"left after everything was closed: {line}" for line in left[:5]))
        return "nothing left behind"


__all__ = ["CheckReport", "Finding", "check_env"]
