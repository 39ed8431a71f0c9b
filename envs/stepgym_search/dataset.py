"""Reads rows of questions with golden answers, in the forms of Search-R1, SkyRL and FlashRAG, from files or the hub.

A row has `question`, or `prompt` (a list of messages), or both; and its golden answers in
`reward_model.ground_truth.target` (SkyRL calls it `reward_spec`) or in `golden_answers`. `data_source` says which
benchmark it is from. Every row is checked when a split is loaded, so that a missing field shows before a run starts,
with the row and the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from stepgym.env.rows import read_rows
from stepgym.env.task import Task
from stepgym.errors import UserError

_SPECS = ("reward_model", "reward_spec")


def load_rows(source: str, split: str) -> list[Task]:
    """The tasks of a data set; each row's own messages, if it has them, are in the task's `data["messages"]`.

    Args:
        source: A file, a folder or a name on the hub; see `stepgym.env.rows.read_rows`. FlashRAG's benchmarks are
            configs of one data set: `RUC-NLPIR/FlashRAG_datasets:nq#test`.
        split: The split that is wanted.

    Raises:
        UserError: Something is missing or not what it should be; names the file, the row and the field.
    """
    rows = enumerate(read_rows(source, split, where="search"))
    return [_task(row, place, number, index) for index, (place, number, row) in rows]


def _task(row: Any, place: str, number: int, index: int) -> Task:
    where = f"search: {place}, row {number}"
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row is a mapping, not {type(row).__name__}")
    messages = _messages(row, where)
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        if not messages:
            raise UserError(f"{where}: no field 'question' or 'prompt'; it has {', '.join(sorted(map(str, row)))}")
        question = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    else:
        question = question.strip()
        question += "" if question.endswith("?") else "?"  # as the published data were made
    benchmark = row.get("data_source")
    data: dict[str, Any] = {"data_source": benchmark if isinstance(benchmark, str) and benchmark else _name(place)}
    if messages:
        data["messages"] = messages
    return Task(id=f"{data['data_source']}/{index}", prompt=question, answer=_answers(row, where), data=data)


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """The row's own messages; empty where it has none."""
    prompt = _plain(row.get("prompt"))
    if prompt is None or prompt == "":
        return []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = []
    for message in prompt if isinstance(prompt, list) else [None]:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise UserError(f"{where}, field 'prompt': expected a list of messages with 'role' and 'content'")
        messages.append({"role": message["role"], "content": message["content"]})
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}, field 'prompt': no message has the role 'user'")
    return messages


def _answers(row: Mapping[str, Any], where: str) -> list[str]:
    """The golden answers. None at all is no error here: such a task is reported unscorable when it is played."""
    field, answers = "golden_answers", row.get("golden_answers")
    for name in _SPECS:
        spec = row.get(name)
        if isinstance(spec, str):
            try:
                spec = json.loads(spec)
            except ValueError:
                spec = None
        if isinstance(spec, Mapping) and "ground_truth" in spec:
            truth = spec["ground_truth"]
            field, answers = f"{name}.ground_truth", truth
            if isinstance(truth, Mapping):
                field, answers = f"{name}.ground_truth.target", truth.get("target")
            break
    answers = _plain(answers)
    if answers is None:
        raise UserError(f"{where}: no golden answers in 'reward_model.ground_truth.target' or 'golden_answers'")
    listed = answers if isinstance(answers, list) else [answers]
    for answer in listed:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise UserError(f"{where}, field {field!r}: expected text or a list of texts, not {answers!r:.80}")
    return [str(answer) for answer in listed]


def _plain(value: Any) -> Any:
    """A list where there is an array or a tuple, anything else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _name(place: str) -> str:
    """What a file, or a place on the hub (`owner/name:config[split]`), is called."""
    hub = re.fullmatch(r"[^/]+/([^:\[]+)(?::([^\[]+))?\[.*\]", place)
    return (hub[2] or hub[1]) if hub else PurePath(place).stem
