"""Promise 13: An empty gold answer never scores: the task is reported unscorable."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgym_search.env import SearchEnv
from stepgym_sql.env import SQLEnv

from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.errors import UnscorableTask
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.run.rollouts import rollout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("empty")
    connection = sqlite3.connect(root / "t.sqlite")
    connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
    connection.execute("INSERT INTO t VALUES (1, 'x')")
    connection.commit()
    connection.close()
    yield str(root)
    close_shared(SQLEnv)


def begin(root: str, gold: Any, **config: Any) -> None:
    env = SQLEnv(database_root=root, workers=1, **config)
    messages = [{"role": "user", "content": "?"}]
    env.reset(options={"task": Task("empty", "?", gold, {"database": "t.sqlite", "messages": messages})})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    condition=st.sampled_from(["a = 2", "b IS NULL", "0", "a IN (SELECT a FROM t WHERE b = 'y')", "b = ''"]),
    columns=st.sampled_from(["*", "a", "b, a", "DISTINCT b"]),
    comparison=st.sampled_from(["multiset", "set"]),
    actions=st.sampled_from(["tags", "tools"]),
    ordered=st.booleans(),
)
def test_a_gold_query_without_rows(
    root: str, condition: str, columns: str, comparison: str, actions: str, ordered: bool
) -> None:
    gold = f"SELECT {columns} FROM t WHERE {condition}{' ORDER BY 1' if ordered else ''}"
    with pytest.raises(UnscorableTask, match="task empty: the gold query gives no rows"):
        begin(root, gold, comparison=comparison, actions=actions)


@pytest.mark.parametrize("gold", [None, "", "  \n"])
def test_no_gold_query(root: str, gold: str | None) -> None:
    with pytest.raises(UnscorableTask, match="task empty: there is no gold query"):
        begin(root, gold)


def test_a_gold_answer_of_zero_or_null_is_an_answer(root: str) -> None:
    begin(root, "SELECT count(*) FROM t WHERE a = 2")
    begin(root, "SELECT max(a) FROM t WHERE a = 2")


NOTHING = st.sampled_from(["", " ", "the", "A", "an the", "...", "?!", "。", "\u200b", "“ ”"])


@settings(max_examples=60)
@given(
    gold=st.one_of(st.none(), NOTHING, st.lists(NOTHING, max_size=3)),
    match=st.sampled_from(["exact", "substring"]),
    actions=st.sampled_from(["tags", "tools"]),
)
def test_golden_answers_of_which_nothing_is_left(gold: Any, match: Any, actions: Any) -> None:
    env = SearchEnv(match=match, actions=actions, allow_search=False)
    with pytest.raises(UnscorableTask, match="task empty: there is no golden answer"):
        env.reset(options={"task": Task("empty", "?", gold)})


@given(answer=NOTHING, match=st.sampled_from(["exact", "substring"]))
def test_an_answer_of_which_nothing_is_left(answer: str, match: Any) -> None:
    env = SearchEnv(match=match, allow_search=False)
    env.reset(options={"task": Task("full", "?", ["the Narn", "", "a"])})
    _, reward, terminated, *_ = env.step(f"<answer>{answer}</answer>")
    assert (reward, terminated) == (0.0, True)


def test_it_is_reported_once_and_not_tried_again() -> None:
    tasks = [Task("empty", "?", [""], {"plan": {"searches": [], "answer": "", "slips": {}}})]
    (found,) = rollout(
        lambda: SearchEnv(allow_search=False),
        tasks,
        expert={},
        policy=OutcomePolicy(max_infrastructure_share=1.0),
        renderer=Renderer(build_tiny_tokenizer(["?"])),
    )
    assert (found.outcome, found.reward, found.id.attempt) == (Outcome.ENV_ERROR, None, 0)
    assert "unscorable task: task empty" in found.outcome_detail
