"""The columns of a store: trajectories to a table and back.

One row is one trajectory; `steps` is a list of structs. What people filter on has a column of its own; free-form
values (messages, task, tools, provenance) are JSON text (`json_text`); ids and what runs along with them are lists of
numbers, null where the step has None, so that None and [] stay different things. Prompts are stored as deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stepgym.record.delta import Delta, find_deltas, materialise
from stepgym.record.json_text import dump_json, dump_text, load_json, load_text
from stepgym.record.number_lists import ListColumn, Numbers, number_lists, numbers_of, offsets_of, own
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId

VERSION = "2"
VERSION_KEY = b"stepgym.store_version"

_EXPERTS = pa.struct(
    [
        ("shape", pa.list_(pa.int32())),  # of the whole array: [P + R, layers, k]
        ("start", pa.int32()),  # rows before this one are those of the parent, or absent (-1)
        ("from_parent", pa.bool_()),
        ("values", pa.list_(pa.int16())),
    ]
)

STEP_TYPE = pa.struct(
    [
        ("parent", pa.int32()),
        ("keep", pa.int32()),
        ("new_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("sampler", pa.string()),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("new_messages", pa.string()),
        ("message", pa.string()),
        ("rendering", pa.string()),
        ("sampling", pa.string()),
        ("stop", pa.string()),
        ("max_tokens", pa.int32()),
        ("follows", pa.int32()),
        ("weights_versions", pa.string()),
        ("routed_experts", _EXPERTS),
        ("metrics", pa.string()),
    ]
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("phase", pa.string()),
        ("iteration", pa.int64()),
        ("task_id", pa.string()),
        ("sample", pa.int64()),
        ("attempt", pa.int64()),
        ("final", pa.bool_()),
        ("outcome", pa.string()),
        ("outcome_detail", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("success", pa.bool_()),
        ("turns", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("response_tokens", pa.int64()),
        ("reward_low", pa.float64()),
        ("reward_high", pa.float64()),
        ("env_id", pa.string()),
        ("env_config", pa.string()),
        ("task", pa.string()),
        ("tools", pa.string()),
        ("seeds", pa.string()),
        ("metrics", pa.string()),
        ("provenance", pa.string()),
        ("error", pa.string()),
        ("started_at", pa.float64()),
        ("steps", pa.list_(STEP_TYPE)),
    ],
    metadata={VERSION_KEY: VERSION},
)

_TEXT_OF_STEP = ("sampler", "status", "finish_reason", "rendering")
_JSON_OF_STEP = ("reward_parts", "new_messages", "stop", "weights_versions", "metrics")
_JSON_OF_TRAJECTORY = ("reward_parts", "env_config", "task", "tools", "seeds", "metrics", "provenance")


class _StoredStep(NamedTuple):
    """A step and the delta it is stored as."""

    step: Step
    delta: Delta
    parent: Step | None


class Row(NamedTuple):
    """A trajectory as the columns that will hold it: a copy, which later changes to the trajectory do not reach.

    Attributes:
        cells: The value of each column but `steps`.
        step_lists: For each field of a step that is a plain value, its value by step.
        step_numbers: For each field of a step that is a list of numbers, the lists by step.
        turns: Number of steps.
    """

    cells: dict[str, Any]
    step_lists: dict[str, list[Any]]
    step_numbers: dict[str, Numbers]
    turns: int

    @property
    def nbytes(self) -> int:
        """Bytes, roughly: those of what may be large."""
        lists = (self.cells.values(), self.step_lists["message"], self.step_lists["new_messages"])
        texts = sum(len(text) for text in chain(*lists) if isinstance(text, str))
        return texts + sum(column.values.nbytes for column in self.step_numbers.values())


# ---- trajectories to a table ----------------------------------------------------------------------------------


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """A table with `SCHEMA`, one row per trajectory. Raises as `to_row`."""
    return rows_to_table([to_row(trajectory) for trajectory in trajectories])


def to_row(trajectory: Trajectory) -> Row:
    """The row of a trajectory.

    Raises `TypeError`, `ValueError`, `AttributeError`, `OverflowError` or `pyarrow.ArrowException` where it holds
    what its column cannot; a row that was made can be made a table.
    """
    cells = {name: _cell(trajectory, name) for name in SCHEMA.names if name != "steps"}
    for name in _CHECKED:
        pa.scalar(cells[name], _TYPES[name])
    stored = list(_with_deltas(trajectory.steps))
    steps = [s.step for s in stored]
    new_ids = [None if s.step.prompt_ids is None else s.step.prompt_ids[s.delta.keep :] for s in stored]
    numbers = {
        "new_ids": numbers_of(new_ids, np.int32),
        "response_ids": numbers_of([s.response_ids for s in steps], np.int32),
        "loss_mask": numbers_of([s.loss_mask for s in steps], np.int8),
        "logprobs": numbers_of([s.logprobs for s in steps], np.float32),
    }
    lists: dict[str, list[Any]] = {
        "parent": [s.delta.parent for s in stored],
        "keep": [s.delta.keep for s in stored],
        "reward": [float(s.reward) for s in steps],
        "max_tokens": [s.max_tokens for s in steps],
        "follows": [s.follows for s in steps],
        "message": [None if s.message is None else dump_json(dict(s.message)) for s in steps],
        "sampling": _sampling_texts(steps),
    }
    for name in _TEXT_OF_STEP:
        lists[name] = [dump_text(getattr(s, name)) for s in steps]
    for name in _JSON_OF_STEP:
        lists[name] = [dump_json(_plain(getattr(s, name))) for s in steps]
    _add_experts(stored, lists, numbers)
    return Row(cells, lists, numbers, len(steps))


def rows_to_table(rows: Sequence[Row]) -> pa.Table:
    """A table with `SCHEMA` of rows."""
    arrays = [
        pa.array([row.cells[field.name] for row in rows], field.type) for field in SCHEMA if field.name != "steps"
    ]
    offsets = offsets_of(row.turns for row in rows)
    arrays.append(pa.ListArray.from_arrays(pa.array(offsets), _step_array(rows)))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _cell(trajectory: Trajectory, name: str) -> Any:
    if name in _JSON_OF_TRAJECTORY:
        return dump_json(_plain(getattr(trajectory, name)))
    special = _SPECIAL_CELLS.get(name)
    value = special(trajectory) if special else getattr(trajectory, name)
    return dump_text(value) if isinstance(value, str) else value


_SPECIAL_CELLS: dict[str, Callable[[Trajectory], Any]] = {
    "id": lambda t: str(t.id),
    "phase": lambda t: t.id.phase,
    "iteration": lambda t: t.id.iteration,
    "task_id": lambda t: t.id.task_id,
    "sample": lambda t: t.id.sample,
    "attempt": lambda t: t.id.attempt,
    "outcome": lambda t: str(t.outcome),
    "reward": lambda t: None if t.reward is None else float(t.reward),
    "success": lambda t: None if t.success is None else bool(t.success),
    "turns": lambda t: len(t.steps),
    "prompt_tokens": lambda t: sum(len(s.prompt_ids) for s in t.steps if s.prompt_ids is not None),
    "response_tokens": lambda t: sum(len(s.response_ids) for s in t.steps if s.response_ids is not None),
    "reward_low": lambda t: float(t.reward_range[0]),
    "reward_high": lambda t: float(t.reward_range[1]),
}

_TYPES = {field.name: field.type for field in SCHEMA}
_SAMPLING_FIELDS = [field.name for field in fields(Sampling)]
_CHECKED = [name for name in SCHEMA.names if name not in (*_JSON_OF_TRAJECTORY, "steps")]
"""Columns whose values are taken as they are, so that Arrow has to say whether they fit."""


def _plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, so that the fast path of `dump_json` takes them."""
    if isinstance(value, dict | list | tuple):
        return value
    return dict(value) if isinstance(value, Mapping) else list(value)


def _sampling_texts(steps: Sequence[Step]) -> list[str | None]:
    # By identity, because nearly all steps share one object, and because equal ones (0.0 and -0.0) may differ in text.
    given = {id(s.sampling): s.sampling for s in steps}
    texts = {key: None if sampling is None else dump_json(_as_dict(sampling)) for key, sampling in given.items()}
    return [texts[id(s.sampling)] for s in steps]


def _as_dict(sampling: Sampling) -> dict[str, Any]:
    # What `dataclasses.asdict` gives, without its search for what may be nested.
    return {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}


def _with_deltas(steps: Sequence[Step]) -> Iterator[_StoredStep]:
    for step, delta in zip(steps, find_deltas(steps), strict=True):
        yield _StoredStep(step, delta, steps[delta.parent] if delta.parent >= 0 else None)


def _step_array(rows: Sequence[Row]) -> pa.StructArray:
    columns = []
    for field in STEP_TYPE:
        if field.name == "routed_experts":
            columns.append(_experts_array(rows))
        elif pa.types.is_list(field.type):
            columns.append(number_lists([row.step_numbers[field.name] for row in rows], field.type))
        else:
            columns.append(_value_array(rows, field.name, field.type))
    return pa.StructArray.from_arrays(columns, fields=list(STEP_TYPE))


def _value_array(rows: Sequence[Row], name: str, kind: pa.DataType) -> pa.Array:
    return pa.array(list(chain.from_iterable(row.step_lists[name] for row in rows)), kind)


def _add_experts(stored: Sequence[_StoredStep], lists: dict[str, list[Any]], numbers: dict[str, Numbers]) -> None:
    shapes: list[NDArray[Any] | None] = []
    starts: list[int | None] = []
    from_parent: list[bool | None] = []
    values: list[NDArray[Any] | None] = []
    for step, delta, parent in stored:
        experts = step.routed_experts
        if experts is None:
            for column in (shapes, starts, from_parent, values):
                column.append(None)
            continue
        theirs = None if parent is None else parent.routed_experts
        inherits = theirs is not None and np.array_equal(theirs[: delta.keep], experts[: delta.keep])
        start = delta.keep if inherits else _leading_absent(experts)
        shapes.append(np.array(experts.shape))
        starts.append(start)
        from_parent.append(inherits)
        values.append(experts[start:].reshape(-1))
    lists["experts.start"], lists["experts.from_parent"] = starts, from_parent
    numbers["experts.shape"], numbers["experts.values"] = numbers_of(shapes, np.int32), numbers_of(values, np.int16)


def _experts_array(rows: Sequence[Row]) -> pa.StructArray:
    columns = []
    for field in _EXPERTS:
        name = f"experts.{field.name}"
        if pa.types.is_list(field.type):
            columns.append(number_lists([row.step_numbers[name] for row in rows], field.type))
        else:
            columns.append(_value_array(rows, name, field.type))
    missing = columns[_EXPERTS.get_field_index("start")].is_null()
    return pa.StructArray.from_arrays(columns, fields=list(_EXPERTS), mask=missing)


def _leading_absent(experts: NDArray[np.int16]) -> int:
    """Number of leading rows that are all -1."""
    present = (experts != -1).any(axis=tuple(range(1, experts.ndim)))
    return int(present.argmax()) if present.any() else len(experts)


# ---- a table to trajectories ----------------------------------------------------------------------------------


def from_table(table: pa.Table) -> list[Trajectory]:
    """The trajectories of a table with `SCHEMA`; without its column `steps`, trajectories without steps.

    Raises `ValueError` where the content is not what `to_table` writes.
    """
    with_steps = "steps" in table.column_names
    rows = table.drop_columns(["steps"]).to_pylist() if with_steps else table.to_pylist()
    steps: list[Sequence[Step]] = [()] * len(rows)
    if with_steps:
        steps = list(_read_steps(table.column("steps").combine_chunks()))
    return [_read_row(row, own) for row, own in zip(rows, steps, strict=True)]


def _read_row(row: dict[str, Any], steps: Sequence[Step]) -> Trajectory:
    values = {name: load_json(row[name]) for name in _JSON_OF_TRAJECTORY}
    phase, task_id = load_text(row["phase"]), load_text(row["task_id"])
    return Trajectory(
        id=TrajectoryId(phase, row["iteration"], task_id, row["sample"], row["attempt"]),
        outcome=Outcome(row["outcome"]),
        outcome_detail=load_text(row["outcome_detail"]),
        final=row["final"],
        steps=tuple(steps),
        reward=row["reward"],
        success=row["success"],
        env_id=load_text(row["env_id"]),
        reward_range=(row["reward_low"], row["reward_high"]),
        error=load_text(row["error"]),
        started_at=row["started_at"],
        **values,
    )


def _read_steps(column: pa.ListArray | pa.ChunkedArray) -> Iterator[list[Step]]:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in chunks:
        offsets = np.asarray(chunk.offsets)
        first, last = int(offsets[0]), int(offsets[-1])
        struct = chunk.values.slice(first, last - first)
        fields_by_name = dict(zip((f.name for f in STEP_TYPE), struct.flatten(), strict=True))
        reader = _StepReader(fields_by_name)
        for begin, end in zip(offsets[:-1] - first, offsets[1:] - first, strict=True):
            yield reader.read(int(begin), int(end))


class _StepReader:
    """Turns the rows of the flattened `steps` column back into steps."""

    def __init__(self, columns: dict[str, pa.Array]) -> None:
        numbers = ("new_ids", "response_ids", "loss_mask", "logprobs")
        self._numbers = {name: ListColumn(columns[name]) for name in numbers}
        experts = dict(zip((f.name for f in _EXPERTS), columns["routed_experts"].flatten(), strict=True))
        self._shapes, self._experts = ListColumn(experts["shape"]), ListColumn(experts["values"])
        self._start, self._from_parent = experts["start"].to_pylist(), experts["from_parent"].to_pylist()
        values = ("parent", "keep", "reward", "max_tokens", "follows", "message", "sampling")
        names = (*values, *_TEXT_OF_STEP, *_JSON_OF_STEP)
        self._plain = {name: columns[name].to_pylist() for name in names}

    def read(self, begin: int, end: int) -> list[Step]:
        """The steps of the trajectory whose steps are the rows from `begin` to `end`."""
        rows = range(begin, end)
        deltas = [Delta(self._plain["parent"][row], self._plain["keep"][row]) for row in rows]
        new_ids = [self._numbers["new_ids"][row] for row in rows]
        ids = materialise(deltas, new_ids, [self._numbers["response_ids"][row] for row in rows])
        steps: list[Step] = []
        for row, delta, (prompt_ids, response_ids) in zip(rows, deltas, ids, strict=True):
            plain = {name: column[row] for name, column in self._plain.items()}
            steps.append(
                Step(
                    prompt_ids=prompt_ids,
                    response_ids=response_ids,
                    loss_mask=own(self._numbers["loss_mask"][row]),
                    logprobs=own(self._numbers["logprobs"][row]),
                    routed_experts=self._read_experts(row, delta, steps),
                    reward=plain["reward"],
                    message=None if plain["message"] is None else load_json(plain["message"]),
                    sampling=None if plain["sampling"] is None else Sampling(**load_json(plain["sampling"])),
                    sampler=load_text(plain["sampler"]),  # type: ignore[arg-type]
                    status=load_text(plain["status"]),  # type: ignore[arg-type]
                    finish_reason=load_text(plain["finish_reason"]),
                    rendering=load_text(plain["rendering"]),
                    reward_parts=load_json(plain["reward_parts"]),
                    new_messages=tuple(load_json(plain["new_messages"])),
                    stop=tuple(load_json(plain["stop"])),
                    max_tokens=plain["max_tokens"],
                    follows=plain["follows"],
                    weights_versions=tuple(tuple(span) for span in load_json(plain["weights_versions"])),
                    metrics=load_json(plain["metrics"]),
                )
            )
        return steps

    def _read_experts(self, row: int, delta: Delta, earlier: Sequence[Step]) -> NDArray[np.int16] | None:
        shape, values = self._shapes[row], self._experts[row]
        if shape is None or values is None:
            return None
        experts = np.full(tuple(shape), -1, dtype=np.int16)
        start = self._start[row]
        if self._from_parent[row]:
            theirs = earlier[delta.parent].routed_experts
            if theirs is None:
                raise ValueError("routed experts refer to a parent that has none")
            experts[:start] = theirs[:start]
        experts[start:] = values.reshape(experts[start:].shape)
        return experts
