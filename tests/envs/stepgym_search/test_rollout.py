"""Whole episodes through the recorder: what is sent, what is recorded, and whose fault a dead server is."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepgym_search.actions import STOP
from stepgym_search.corpus import open_corpus
from stepgym_search.encyclopedia import EncyclopediaConfig, encyclopedia_file
from stepgym_search.env import SearchEnv
from stepgym_search.retrievers.bm25 import BM25Retriever
from stepgym_search.server.app import create_app

from stepgym.credit.treatment import treat
from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.merge import merge_steps
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.run.rollouts import RolloutConfig, rollout

TAGS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
TEMPLATES = Path(__file__).parents[2] / "chat_templates"
SMALL: dict[str, Any] = {"articles": 200, "instructions": "none", "observation_format": "brief"}


@pytest.fixture(autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SearchEnv)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = [task.prompt for task in SearchEnv(**SMALL).tasks("train")[:50]]
    return build_tiny_tokenizer(texts, special_tokens=TAGS)


def env(**config: Any) -> Any:
    return lambda: SearchEnv(**{**SMALL, **config})


def tasks(number: int = 8) -> Any:
    return SearchEnv(**SMALL).tasks("train")[:number]


@pytest.mark.parametrize("turns", ["conversation", "continue"])
def test_the_expert_plays_through_the_recorder(tokenizer: Any, turns: Any, tmp_path: Path) -> None:
    renderer = Renderer(tokenizer, turns=turns)
    with TrajectoryStore(tmp_path / "s", "a") as store:
        rollout(env(), tasks(), expert={}, renderer=renderer, store=store)
    found = list(TrajectoryStore(tmp_path / "s"))
    assert len(found) == 8
    for trajectory in found:
        assert (trajectory.outcome, trajectory.reward, trajectory.success) == (Outcome.COMPLETED, 1.0, True)
        assert trajectory.reward_parts == {"correct": 1.0}
        for step, later in zip(trajectory.steps, [*trajectory.steps[1:], None], strict=True):
            assert step.prompt_ids is not None
            assert step.response_ids is not None
            said = renderer.decode(step.response_ids)
            assert said.endswith(STOP)
            assert "<information>" not in said
            if later is not None:
                assert later.prompt_ids is not None
                so_far = [*step.prompt_ids, *step.response_ids]
                assert list(later.prompt_ids[: len(so_far)]) == so_far
                assert "<information>" in renderer.decode(later.prompt_ids[len(so_far) :])
                assert step.metrics["searches"] >= 1
        sequences, report = merge_steps(trajectory.steps)
        assert (len(sequences), report.steps) == (1, len(trajectory.steps))
        assert sequences[0].response_ids is not None
        observed = np.asarray(sequences[0].loss_mask) == 0
        assert "<information>" in renderer.decode(np.asarray(sequences[0].response_ids)[observed])


@pytest.mark.parametrize("template", ["tools_json", "tools_xml"])
def test_the_expert_calls_the_tool_as_a_template_writes_it(template: str) -> None:
    config = {**SMALL, "actions": "tools", "observation_format": "search-r1"}
    tokenizer = build_tiny_tokenizer([task.prompt for task in tasks()], special_tokens=TAGS)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    renderer = Renderer(tokenizer)
    found = rollout(env(**config), tasks(), expert={}, renderer=renderer)
    assert all((t.outcome, t.reward) == (Outcome.COMPLETED, 1.0) for t in found)
    last = found[0].steps[-1]
    assert last.prompt_ids is not None
    assert "Doc 1(Title: " in renderer.decode(last.prompt_ids)


class Trapped(SearchEnv):
    """Its expert finds a document with the right answer in it, in tags, and gives none itself."""

    def expert(self, task: Task, **options: Any) -> Iterator[Any]:
        if self.actions == "tags":
            yield "<think>so</think><search>trap thieves</search>"
            yield "I read <information>, and still do not know"
        else:
            function = {"name": "search", "arguments": json.dumps({"query": "trap thieves"})}
            tool_calls = [{"id": "call_1", "type": "function", "function": function}]
            yield {"role": "assistant", "content": "so", "tool_calls": tool_calls}
            yield "I do not know"


@pytest.mark.parametrize("observation_format", ["search-r1", "skyrl", "brief"])
@pytest.mark.parametrize(
    ("actions", "turns"), [("tags", "conversation"), ("tags", "continue"), ("tools", "conversation")]
)
def test_an_answer_in_a_document_never_scores_whatever_the_model_is_shown(
    passages: Path, observation_format: str, actions: str, turns: Any
) -> None:
    task = Task("t", "Where was Velor born?", ["Narn"])
    tokenizer = build_tiny_tokenizer([task.prompt], special_tokens=TAGS)
    if actions == "tools":
        tokenizer.chat_template = (TEMPLATES / "tools_json.jinja").read_text()
    config = {"corpus": str(passages), "actions": actions, "observation_format": observation_format, "topk": 1}

    def trapped() -> SearchEnv:
        return Trapped(instructions="none", max_turns=2, format_score=0.2, **config)

    (found,) = rollout(trapped, [task], expert={}, renderer=Renderer(tokenizer, turns=turns))
    last = found.steps[-1]
    assert last.prompt_ids is not None
    assert "<answer>Narn</answer>" in tokenizer.decode(last.prompt_ids)
    assert (found.reward, found.success) == (0.0, False)
    assert found.reward_parts == {"correct": 0.0, "format": 0.0}


def test_mistakes_are_recorded_with_their_reward(tokenizer: Any) -> None:
    found = rollout(env(), tasks(40), expert={"mistakes": 1.0}, renderer=Renderer(tokenizer))
    wrong = [t for t in found if t.task["data"]["plan"]["slips"]]
    assert len(wrong) > 20
    assert all(t.reward == 0.0 and not t.success and t.outcome is Outcome.COMPLETED for t in wrong)
    assert all(t.reward == 1.0 for t in found if t not in wrong)


def ids(step: Step) -> list[int]:
    assert step.prompt_ids is not None
    return step.prompt_ids.tolist()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_a_dead_server_is_the_environments_fault_and_never_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    dead = {"kind": "http", "url": f"http://127.0.0.1:{free_port()}", "retries": 0, "timeout": 5.0}
    policy = OutcomePolicy(max_infrastructure_share=1.0)
    with TrajectoryStore(tmp_path / "s", "a") as store:
        found = rollout(
            env(retriever=dead), tasks(3), expert={}, renderer=Renderer(tokenizer), store=store, policy=policy
        )
    assert [t.outcome for t in found] == [Outcome.ENV_ERROR] * 3
    assert all(t.reward is None and "127.0.0.1" in t.outcome_detail for t in found)
    attempts = list(TrajectoryStore(tmp_path / "s"))
    assert len(attempts) == 3 * (1 + policy[Outcome.ENV_ERROR].retries) > 3
    assert all(len(t.steps) == 1 and t.steps[0].new_messages is not None for t in attempts)  # nothing was answered
    groups, counts = treat(attempts, policy)
    assert sum(len(group.members) for group in groups) == 0
    assert counts.to_dict()["dropped"] == {"env_error": 3}


@pytest.mark.parametrize("form", ["queries", "query"])
def test_a_real_server_answers_as_the_retriever_itself(
    tokenizer: Any, serve_app: Callable[..., Any], form: str
) -> None:
    corpus = open_corpus(encyclopedia_file(EncyclopediaConfig(articles=200)))
    served = serve_app(create_app(BM25Retriever(corpus)))
    config = {"retriever": {"kind": "http", "url": served.url, "form": form}}
    there = rollout(env(**config), tasks(), expert={}, renderer=Renderer(tokenizer))
    here = rollout(env(), tasks(), expert={}, renderer=Renderer(tokenizer))
    assert all(t.success for t in there)
    for one, other in zip(there, here, strict=True):
        assert [ids(step) for step in one.steps] == [ids(step) for step in other.steps]
    served.stop()
    gone = rollout(
        env(**config),
        tasks(1),
        expert={},
        renderer=Renderer(tokenizer),
        policy=OutcomePolicy(max_infrastructure_share=1),
    )
    assert gone[0].outcome is Outcome.ENV_ERROR
    assert gone[0].reward is None


def test_a_search_that_fails_once_is_played_again(
    tokenizer: Any, retrieval_servers: Any, raw_server: Callable[..., Any]
) -> None:
    result = {"result": [[{"document": {"id": "1", "contents": '"A"\nB'}, "score": 1.0}]]}
    broken, good = retrieval_servers.answer(200, {"results": []}), retrieval_servers.answer(200, result)
    server = raw_server(retrieval_servers.answers(broken, good))
    found = rollout(
        env(retriever={"kind": "http", "url": server.url}),
        tasks(1),
        expert={},
        renderer=Renderer(tokenizer),
        config=RolloutConfig(concurrency=1),
        policy=OutcomePolicy(max_infrastructure_share=1.0),
    )
    assert found[0].id.attempt == 1
    assert (found[0].outcome, found[0].reward) == (Outcome.COMPLETED, 1.0)
