"""The SQL environment: an agent answers questions over real SQLite databases, with several queries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from stepgym.env.base import ActResult, Env
from stepgym.env.messages import Message, call_id, tool_result, user
from stepgym.env.task import Task
from stepgym.errors import ActionError, UserError
from stepgym.record.outcome import Outcome
from stepgym_sql import expert, prompt
from stepgym_sql.compare import same_multiset, same_order, same_set
from stepgym_sql.format import STOP, cut_at_stop, is_well_formed, parse_action
from stepgym_sql.generate.tasks import SPLITS, GeneratorConfig, SchemaSplit, is_generated
from stepgym_sql.generate.world import Names, Variety, World, WorldSpec
from stepgym_sql.observation import (
    INVALID_ACTION,
    INVALID_ACTION_BRIEF,
    INVALID_CALL,
    LOOKING_REFUSED,
    ObservationFormat,
    reminder,
    result_text,
    wrap,
)
from stepgym_sql.pool import QueryResult
from stepgym_sql.prompt import Actions, Instructions
from stepgym_sql.shared import SQLShared

_LOOK_ROWS = 10_000
_LOOK_BYTES = 4 << 20


class SQLEnv(Env):
    """Answer a question over a database: look with queries, then hand in the query that gives the answer.

    The protocol is SkyRL-SQL's: `<think>…</think>`, then `<sql>…</sql>` to look or `<solution>…</solution>` to
    finish; results come back between `<observation>` tags with the number of turns left. The reward comes at the end:
    −1 for a broken format or no solution, 0 for a wrong or failing query, 1 for the rows of the gold query.

    Tasks are generated (seeded, without end, offline), or the rows of a data set with databases on disk.

    Args:
        actions: `tags` in the text, or the `tools` sql and solution; tool calls have no tags to be checked.
        format_reward: Whether a broken format costs −1; without, the reward is 0 or 1 and tags are not checked.
        comparison: `multiset` compares rows with their duplicates, in order where the gold query orders, numbers to
            1e-6; `set` compares exact distinct rows, as the published numbers were made.
        allow_looking: Whether queries before the solution are run at all; without, they are refused.
        max_turns: Turns of an episode.
        on_malformed: Whether a tool call that does not parse costs a turn (`observe`) or ends the episode (`end`).
        query_timeout: Seconds that a query may take while looking.
        score_timeout: Seconds that the solution and the gold query may take.
        memory_mb: MiB of memory that SQLite may use for a query.
        workers: Most query worker processes at a time.
        max_chars: Characters of a result from which on it is cut.
        shown_rows: Rows that a result is cut to.
        instructions: How much the first message explains: `full`, `brief` (one line) or `none`.
        observation_format: `skyrl` is the published wording, `brief` has the same tags and fewer words.
        dataset: Rows to train on: a file, a folder or a name on the hub; None for generated tasks.
        validation_dataset: The same for the validation split.
        test_dataset: The same for the test split.
        database_root: The folder that the databases of these rows lie in.
        seed: Of the generated tasks.
        kinds: Kinds of questions that are generated; None for all.
        schema_names: Schemas that are drawn from; None for all.
        schemas: Whether the splits draw from the same schemas (`shared`) or each from its own (`disjoint`). Databases
            are never shared.
        names: Whether tables and columns are named differently in every database (`varied`), only the columns
            (`columns`), or neither (`plain`).
        spellings: The same for the spelling of categories.
        show_schema: Whether the first message shows the tables of a generated database.
        rows: Rows of the larger tables.
        tables: Most tables of a database; None for all.
        columns: Most columns of a table besides its id and references; None for all.
        column_types: Whether columns are declared with their types.
        paraphrase: Whether the same question comes in several wordings.

    Raises:
        UserError: A value is out of range, or a name does not exist.
    """

    splits: tuple[str, ...] = SPLITS
    success_threshold = 1.0

    def __init__(
        self,
        *,
        actions: Actions = "tags",
        format_reward: bool = True,
        comparison: Literal["multiset", "set"] = "multiset",
        allow_looking: bool = True,
        max_turns: int = 6,
        on_malformed: Literal["observe", "end"] = "observe",
        query_timeout: float = 5.0,
        score_timeout: float = 30.0,
        memory_mb: int = 256,
        workers: int = 4,
        max_chars: int = 9000,
        shown_rows: int = 50,
        instructions: Instructions = "full",
        observation_format: ObservationFormat = "skyrl",
        dataset: str | None = None,
        validation_dataset: str | None = None,
        test_dataset: str | None = None,
        database_root: str | None = None,
        seed: int = 0,
        kinds: list[str] | None = None,
        schema_names: list[str] | None = None,
        schemas: SchemaSplit = "shared",
        names: Names = "varied",
        spellings: Variety = "varied",
        show_schema: bool = True,
        rows: int = 30,
        tables: int | None = None,
        columns: int | None = None,
        column_types: bool = True,
        paraphrase: bool = True,
    ) -> None:
        for name, value, choices in (
            ("actions", actions, get_args(Actions)),
            ("comparison", comparison, ("multiset", "set")),
            ("on_malformed", on_malformed, ("observe", "end")),
            ("instructions", instructions, get_args(Instructions)),
            ("observation_format", observation_format, get_args(ObservationFormat)),
            ("schemas", schemas, get_args(SchemaSplit)),
            ("names", names, get_args(Names)),
            ("spellings", spellings, get_args(Variety)),
        ):
            if value not in choices:
                raise UserError(f"sql: {name} must be one of {', '.join(choices)}, not {value!r}")
        for name, number, low in (
            ("max_turns", max_turns, 1),
            ("query_timeout", query_timeout, 0.01),
            ("score_timeout", score_timeout, 0.01),
            ("memory_mb", memory_mb, 16),
            ("workers", workers, 1),
            ("max_chars", max_chars, 100),
            ("shown_rows", shown_rows, 1),
        ):
            if number < low:
                raise UserError(f"sql: {name} must be at least {low}, not {number}")
        self.actions: Actions = actions
        self.format_reward = format_reward
        self.comparison = comparison
        self.allow_looking = allow_looking
        self.max_turns = max_turns
        self.on_malformed = on_malformed
        self.query_timeout = query_timeout
        self.max_chars = max_chars
        self.shown_rows = shown_rows
        self.instructions: Instructions = instructions
        self.observation_format: ObservationFormat = observation_format
        self.show_schema = show_schema
        self.reward_range = (-1.0, 1.0) if format_reward else (0.0, 1.0)
        self.tools = prompt.tool_schemas() if actions == "tools" else ()
        self.stop = STOP if actions == "tags" else ()
        self.splits = tuple(_datasets(dataset, validation_dataset, test_dataset)) or SPLITS
        _generator(self.config)  # what is wrong with the options shows here, not in the first episode
        self._written: list[str] = []
        self._queries = self._failures = 0
        self._query_seconds = 0.0

    @classmethod
    def open_shared(cls, **config: Any) -> SQLShared:
        """The query workers, databases and tables of tasks of one configuration."""
        return SQLShared(
            workers=config["workers"],
            memory_mb=config["memory_mb"],
            score_timeout=config["score_timeout"],
            generator=_generator(config),
            datasets=_datasets(config["dataset"], config["validation_dataset"], config["test_dataset"]),
            database_root=config["database_root"],
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split; generated ones are made when they are asked for. Raises `UserError`."""
        shared: SQLShared = self.shared
        return shared.tasks(split)

    def begin(self, task: Task) -> list[Message]:
        """The instructions and the question. Raises `UnscorableTask` where the gold query gives no rows."""
        self._written = []
        self._queries = self._failures = 0
        self._query_seconds = 0.0
        shared: SQLShared = self.shared
        self._shared = shared
        self._gold = shared.gold(task)
        if "messages" in task.data:
            messages = [dict(message) for message in task.data["messages"]]
            if self.actions == "tools":
                last = max(index for index, message in enumerate(messages) if message["role"] == "user")
                messages[last]["content"] += prompt.TOOLS_REMARK
            return messages
        schema = "\n".join(World(WorldSpec.from_dict(task.data)).ddl()) if self.shows_schema(task) else None
        text = prompt.build_prompt(
            task.prompt,
            instructions=self.instructions,
            actions=self.actions,
            max_turns=self.max_turns,
            schema=schema,
        )
        return [user(text)]

    def shows_schema(self, task: Task) -> bool:
        """Whether the first message shows the tables."""
        return self.show_schema and is_generated(task)

    def act(self, message: Message) -> ActResult:
        """Run a query, or score the solution."""
        if self.actions == "tools":
            return self._act_on_calls(message)
        self._note(message)
        action = parse_action(self._written[-1])
        if action is None:
            text = INVALID_ACTION if self.observation_format == "skyrl" else INVALID_ACTION_BRIEF
            raise ActionError(text, status="no_action")
        if action.name == "solution":
            return self._finish(action.query, [])
        # A failing query raises, so that every mistake of the agent is counted in one place.
        return [user(self._wrapped(self._look(action.query)))], 0.0, False, False, {"metrics": self._metrics()}

    def conclude(self, outcome: Outcome) -> dict[str, float]:
        """The reward of an episode without a solution: that of a broken format."""
        return self._parts(well_formed=False, correct=False)

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        """Scripted turns that solve the task: see `expert.play` for `mistakes` and `decisions`."""
        unknown = sorted(set(options) - {"mistakes", "decisions"})
        if unknown:
            raise UserError(f"sql: expert: unknown option {unknown[0]!r}; known: decisions, mistakes")
        return expert.play(self, task, **options)

    def error_observation(self, message: Message, error: ActionError) -> list[Message]:
        """The error in the protocol's wrapping, with the turns that are left."""
        if self.actions == "tags":
            self._note(message)
            return [user(self._wrapped(str(error)))]
        text = f"{error}\n{reminder(self.turns_left, self.observation_format)}"
        calls = message.get("tool_calls") or ()
        return [tool_result(text, call_id(call, index)) for index, call in enumerate(calls)] or [user(text)]

    def _act_on_calls(self, message: Message) -> ActResult:
        calls = message.get("tool_calls")
        if not calls:
            raise ActionError(INVALID_CALL, status="no_action")
        results: list[Message] = []
        errors: list[str] = []
        malformed = 0
        for index, call in enumerate(calls):
            answered = call_id(call, index)
            try:
                name, query = _parse_call(call)
                if name == "solution":
                    return self._finish(query, results)
                results.append(tool_result(self._look(query), answered))
            except ActionError as error:
                errors.append(str(error))
                malformed += error.status == "malformed"
                results.append(tool_result(str(error), answered))
        results[-1]["content"] += f"\n{reminder(self.turns_left, self.observation_format)}"
        info: dict[str, Any] = {"metrics": self._metrics()}
        if errors:
            info["action_error"] = "; ".join(errors)
            info["action_status"] = "malformed" if malformed == len(results) else "ok"
        return results, 0.0, False, False, info

    def _look(self, query: str) -> str:
        """The result of a query as text. Raises `ActionError` with the text where it fails."""
        if not self.allow_looking:
            raise ActionError(LOOKING_REFUSED)
        result = self._shared.pool.query(
            self._shared.database_of(self.task),
            query,
            timeout=self.query_timeout,
            max_rows=_LOOK_ROWS,
            max_bytes=_LOOK_BYTES,
            max_cell=self.max_chars,
        )
        self._count(result)
        text = result_text(
            result,
            shown_rows=self.shown_rows,
            max_chars=self.max_chars,
            observation_format=self.observation_format,
        )
        if result.error is not None:
            raise ActionError(text)
        return text

    def _finish(self, query: str, results: list[Message]) -> ActResult:
        well_formed = self.actions == "tools" or not self.format_reward or is_well_formed(self._written)
        error: str | None = None
        correct = False
        if well_formed:
            result = self._run_solution(query)
            error = result.error
            correct = error is None and self._is_right(result)
        parts = self._parts(well_formed=well_formed, correct=correct)
        info: dict[str, Any] = {"success": correct, "reward_parts": parts, "metrics": self._metrics()}
        if error is not None:
            info["solution_error"] = error
        return results, sum(parts.values()), True, False, info

    def _run_solution(self, query: str) -> QueryResult:
        database = self._shared.database_of(self.task)
        # One row more than the gold result has is enough to see that the answer is wrong, except among sets.
        limits = {"max_rows": len(self._gold.rows) + 1} if self.comparison == "multiset" else {}
        result = self._shared.run_to_score(database, query, **limits)
        self._count(result)
        return result

    def _is_right(self, result: QueryResult) -> bool:
        gold = self._gold
        if result.more or len(result.columns) != gold.width:
            return False
        if self.comparison == "set":
            return same_set(result.rows, gold.rows)
        if gold.keys is not None:
            return same_order(result.rows, gold.rows, gold.keys)
        return same_multiset(result.rows, gold.rows)

    def _parts(self, *, well_formed: bool, correct: bool) -> dict[str, float]:
        parts = {"correct": float(correct)}
        if self.format_reward:
            parts["format"] = 0.0 if well_formed else -1.0
        return parts

    def _note(self, message: Message) -> None:
        """Keep what the assistant wrote in this turn, once, up to where generation stopped."""
        if len(self._written) >= self.max_turns - self.turns_left:
            return
        text = str(message.get("text") or message.get("content") or "")
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning and "<think>" not in text:
            text = f"<think>{reasoning}</think>{text}"  # from an endpoint that takes the reasoning out of the text
        self._written.append(cut_at_stop(text))

    def _wrapped(self, body: str) -> str:
        return wrap(body, self.turns_left, self.observation_format)

    def _count(self, result: QueryResult) -> None:
        self._queries += 1
        self._failures += result.error is not None
        self._query_seconds += result.seconds

    def _metrics(self) -> dict[str, float]:
        return {
            "queries": float(self._queries),
            "failed_queries": float(self._failures),
            "query_seconds": self._query_seconds,
        }


def _datasets(train: str | None, validation: str | None, test: str | None) -> dict[str, str]:
    """The splits that come from data sets; empty where tasks are generated."""
    given = {"train": train, "validation": validation, "test": test}
    return {split: source for split, source in given.items() if source is not None}


def _generator(config: Mapping[str, Any]) -> GeneratorConfig:
    """The options of generated tasks. Raises `UserError` for one that is wrong."""
    chosen = {name: config[name] for name in GeneratorConfig.__dataclass_fields__ if name in config}
    for name in ("kinds", "schema_names"):
        chosen[name] = None if chosen[name] is None else tuple(chosen[name])
    return GeneratorConfig(**chosen)


def _parse_call(call: object) -> tuple[Literal["sql", "solution"], str]:
    """The tool and the query of a tool call in the OpenAI format. Raises `ActionError` for anything else."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ActionError("Error: a tool call has a 'function' with 'name' and 'arguments'.", status="malformed")
    name, arguments = function.get("name"), function.get("arguments")
    if name not in ("sql", "solution"):
        raise ActionError(
            f"Error: there is no tool {str(name)[:80]!r}; there are sql and solution.", status="malformed"
        )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ActionError(f"Error: the arguments of {name} are not JSON.", status="malformed") from None
    if not isinstance(arguments, Mapping) or set(arguments) != {"query"} or not isinstance(arguments["query"], str):
        raise ActionError(f"Error: {name} takes one argument, 'query', which is text.", status="malformed")
    return name, arguments["query"]
