"""Answers that a server may give and nobody hopes for: each ends an episode in the right outcome, never a run."""

from __future__ import annotations

import numpy as np
import pytest

from stepgym.env.messages import assistant
from stepgym.env.task import Task
from stepgym.env.tool_env import ToolEnv
from stepgym.env.worker import run_blocking
from stepgym.model.engines.openai import OpenAIEngine
from stepgym.model.tiny import build_tiny_model
from stepgym.record.outcome import Outcome
from stepgym.run.rollouts import RolloutConfig, collect


class Echo(ToolEnv):
    """Say anything, three times."""

    def tasks(self, split):
        return [Task(id="one", prompt="Say something.")]

    def act(self, message):
        self.said = [*getattr(self, "said", []), message["text"]]
        return [], 0.5, len(self.said) == 3, False, {}

    def expert(self, task, **options):
        return [assistant("yes")] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_model(["Say something. yes no " * 4] * 20, width=32, layers=1, heads=2)[1]


def play(canned, tokenizer, *answers):
    server = canned(*answers)
    engine = OpenAIEngine(base_url=server.url, model="m", retries=0, logprobs_kind="processed")
    engine._tokenizer = tokenizer
    (found,) = run_blocking(collect(Echo, [Task(id="one", prompt="Say something.")], engine, config=RolloutConfig()))
    return found


def answer(ids, logprobs, reason="stop"):
    choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs}}
    return 200, {"choices": [choice]}


def test_no_tokens_at_all_are_a_turn_in_which_nothing_was_said(canned, tokenizer):
    found = play(canned, tokenizer, answer([], []))
    assert found.outcome is Outcome.COMPLETED
    assert [len(step.response_ids) for step in found.steps] == [0, 0, 0]
    assert [step.message["text"] for step in found.steps] == [""] * 3
    # The turn that was not ended by its terminator gets it in the next prompt.
    first, second = found.steps[:2]
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert second.prompt_ids[len(first.prompt_ids)] == tokenizer.eos_token_id
    assert found.reward == 1.5


@pytest.mark.parametrize("lowest", [-9999.0, float("-inf")])
def test_a_logprob_of_minus_infinity_is_recorded_as_that(canned, tokenizer, lowest):
    eos = tokenizer.eos_token_id
    found = play(canned, tokenizer, answer([20, eos], [lowest, -0.5]))
    assert found.outcome is Outcome.COMPLETED
    assert found.steps[0].logprobs.tolist() == [-np.inf, -0.5]


def test_a_response_that_was_cut_off_by_the_server_is_an_engine_error_and_retried(canned, tokenizer):
    eos = tokenizer.eos_token_id
    found = play(canned, tokenizer, answer([], [], "abort"), answer([20, eos], [-1.0, -0.5]))
    assert found.outcome is Outcome.COMPLETED
    assert found.id.attempt == 1


def test_a_server_that_stays_broken_leaves_no_reward(canned, tokenizer):
    found = play(canned, tokenizer, (500, {"error": {"message": "the engine is dead"}}))
    assert found.outcome is Outcome.ENGINE_ERROR
    assert found.reward is None
    assert found.id.attempt == 2
