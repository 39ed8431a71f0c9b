"""Records and tiny models for tests of training; tests/invariants takes them over."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig

VOCABULARY = 89


def make_trajectory(
    seed: int = 0,
    *,
    task: str = "task",
    sample: int = 0,
    reward: float | None = 1.0,
    turns: int = 2,
    breaks: Sequence[int] = (),
    step_rewards: Sequence[float] | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    masked_tokens: bool = False,
    temperature: float = 1.0,
    response: int = 5,
    **fields: Any,
) -> Trajectory:
    """A conversation of random ids. The prompt depends on the task only; at the turns `breaks` history is rewritten."""
    rng = np.random.default_rng([seed, sample])
    prompt = np.random.default_rng(sum(task.encode())).integers(0, VOCABULARY, 7)
    rewards = step_rewards if step_rewards is not None else [0.0] * (turns - 1) + [reward or 0.0]
    steps = []
    for turn in range(turns):
        if turn in breaks:
            prompt = np.concatenate([prompt[:5], prompt[8:]])
        said = rng.integers(0, VOCABULARY, 1 + int(rng.integers(0, response)))
        steps.append(
            Step(
                prompt_ids=prompt,
                response_ids=said,
                loss_mask=rng.integers(0, 2, len(said)) if masked_tokens else None,
                logprobs=-np.log(VOCABULARY) + rng.normal(0, 0.3, len(said)),
                reward=rewards[turn],
                sampling=Sampling(temperature=temperature),
            )
        )
        prompt = np.concatenate([prompt, said, rng.integers(0, VOCABULARY, 3)])
    return Trajectory(
        id=TrajectoryId("train", 0, task, sample),
        outcome=outcome,
        steps=steps,
        reward=reward,
        success=None if reward is None else reward > 0,
        reward_range=(-1.0, 1.0),
        **fields,
    )


def make_group(
    seed: int, rewards: Sequence[float], *, turns: Sequence[int] = (1, 3, 2, 4), **fields: Any
) -> list[Trajectory]:
    """One trajectory per reward, of differing numbers of turns."""
    return [
        make_trajectory(seed, sample=i, reward=reward, turns=turns[i % len(turns)], **fields)
        for i, reward in enumerate(rewards)
    ]


def make_model(architecture: str = "qwen3", seed: int = 0, **config: Any) -> Any:
    """A random decoder: 2 layers, width 16."""
    import transformers

    names = {
        "qwen3": "Qwen3",
        "qwen2": "Qwen2",
        "llama": "Llama",
        "mistral": "Mistral",
        "gemma2": "Gemma2",
        "granite": "Granite",
        "qwen3_moe": "Qwen3Moe",
    }
    name = names[architecture]
    if architecture == "qwen3_moe":
        config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, **config}
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": architecture == "qwen3",
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**sizes, **config}))
    with torch.no_grad():
        for parameter in made.parameters():  # larger weights than at initialisation: nothing is nearly uniform
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return made


def make_policy(
    architecture: str = "qwen3",
    seed: int = 0,
    dtype: str = "float32",
    budget: int = 16384,
    layout: str = "auto",
) -> Policy:
    """A policy on the CPU with a random model."""
    config = PolicyConfig(device="cpu", dtype=dtype, micro_batch_tokens=budget, layout=layout)
    return Policy(make_model(architecture, seed), config)


def gradient(policy: Policy) -> torch.Tensor:
    """All gradients of a policy, in float64, one after the other."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.model.parameters()]
    return torch.cat([part.double().flatten() for part in parts])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make() -> SimpleNamespace:
    """`make.trajectory`, `make.group`, `make.model`, `make.policy`, `make.gradient`."""
    return SimpleNamespace(
        trajectory=make_trajectory, group=make_group, model=make_model, policy=make_policy, gradient=gradient
    )
