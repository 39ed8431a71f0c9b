"""`stepgym eval --env search`: out of the box, against endpoints that really listen, with the bundled encyclopedia."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stepgym_search.env import SearchEnv

from stepgym.env.shared import close_shared
from stepgym.record.store import TrajectoryStore

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with nothing in it, as of somebody who has just installed stepgym."""
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    close_shared(SearchEnv)


def said(text: str) -> tuple[int, Any]:
    """An answer of a chat endpoint; like most, it cuts off the string that it stopped at."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


def test_out_of_the_box(stepgym: Callable[..., Any], canned: Callable[..., Any], home: Path, tmp_path: Path) -> None:
    task = SearchEnv().tasks("test")[0]
    searches = task.data["plan"]["searches"]
    answers = [said(f"<think>hm</think><search>{query}") for query in searches]
    server = canned(*answers, said(f"<think>so</think><answer>{task.answer[0]}"), models=MODELS)
    where = ["--base-url", server.url, "--model", "m", "--api", "chat"]
    done = stepgym("eval", "--env", "search", *where, "--tasks", 1, "--json", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["episodes"], result["success"], result["mean_reward"]) == (1, 1.0, 1.0)
    bodies = [body for _, body in server.received]
    assert bodies[0]["stop"] == ["</search>", "</answer>"]
    first, last = bodies[0]["messages"], bodies[-1]["messages"]
    assert len(bodies) == len(searches) + 1
    assert first[0]["content"].startswith("Answer the given question.")
    assert first[0]["content"].endswith(f"Question: {task.prompt}\n")
    assert last[1]["content"] == f"<think>hm</think><search>{searches[0]}</search>"
    assert last[2]["content"].startswith("\n\n<information>Doc 1(Title: ")
    assert list(home.glob("search/encyclopedias/*"))
    assert list(home.glob("search/indexes/bm25s-*/manifest.json"))
    with TrajectoryStore(tmp_path / "run" / "trajectories") as store:
        (trajectory,) = store
    assert trajectory.reward_parts == {"correct": 1.0}
    assert trajectory.steps[-1].metrics["gold_retrieved"] == 1.0


@pytest.mark.parametrize("actions", ["tags", "tools"])
def test_with_a_tokenizer_every_token_is_recorded(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path, actions: str
) -> None:
    server, out = start_server(), tmp_path / "run"
    where = ["--base-url", server.url, "--model", server.name, "--tokenizer", server.folder]
    options = ["env.instructions=none", "env.observation_format=brief", "env.articles=200", "env.max_turns=2"]
    limits = ["rollout.max_response_tokens=8", f"env.actions={actions}"]
    done = stepgym("eval", "--env", "search", *where, "--tasks", 4, "--json", "--out", out, *options, *limits)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["episodes"] == sum(result["outcomes"].values()) == 4
    assert 0.0 <= result["mean_reward"] <= 1.0
    with TrajectoryStore(out / "trajectories") as store:
        assert all(step.prompt_ids is not None for trajectory in store for step in trajectory.steps)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("env.retreiver=bm25s", "did you mean 'retriever'"),
        ("env.retriever=bm25", "did you mean 'bm25s'"),
        ("env.corpus=nowhere.jsonl", "there is no corpus at"),
        ("env.test_dataset=nowhere.jsonl", "a data set needs `corpus`"),
        ("env.kinds=[four_hop]", "four_hop"),
        ("env.retriever={kind: http}", "the field 'url' is missing"),
    ],
)
def test_what_is_wrong_is_one_line(
    stepgym: Callable[..., Any], canned: Callable[..., Any], tmp_path: Path, field: str, said: str
) -> None:
    server = canned((200, {}), models=MODELS)
    where = ["--base-url", server.url, "--model", "m", "--api", "chat", "--out", tmp_path / "run"]
    done = stepgym("eval", "--env", "search", *where, field)
    assert done.code == 2, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_retrieval_server_that_is_gone_leaves_the_evaluation_incomplete(
    stepgym: Callable[..., Any], canned: Callable[..., Any], tmp_path: Path
) -> None:
    server = canned(said("<search>Velor"), models=MODELS)
    gone = canned(None)
    gone.close()
    where = ["--base-url", server.url, "--model", "m", "--api", "chat", "--out", tmp_path / "run", "--json"]
    retriever = f"env.retriever={{kind: http, url: '{gone.url}', retries: 0, timeout: 5}}"
    done = stepgym("eval", "--env", "search", *where, "--tasks", 2, retriever)
    assert done.code == 3, done.err
    result = json.loads(done.out)
    assert result["incomplete"] is True
    assert result["excluded"]["env_error"] == 2
