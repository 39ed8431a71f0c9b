"""The critic: its values, its gradient in every layout, what it learns, and credit by token within a learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.record.outcome import OutcomePolicy
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.config import LearnerConfig
from stepgym.train.critic import Critic, explained_variance, value_loss
from stepgym.train.critic_config import CriticConfig
from stepgym.train.learner import Learner
from stepgym.train.lora import LoRAConfig
from stepgym.train.mini_batch import MiniBatch, Signal
from stepgym.train.policy import Policy, PolicyConfig

QUICK = {"learning_rate": 3e-3, "max_grad_norm": None}


def mini_of(policy: Policy, made: list[Any]) -> MiniBatch:
    """A mini-batch of all groups."""
    groups, _ = treat(made, OutcomePolicy())
    return MiniBatch.of(policy, [Signal(group, group.rewards) for group in groups])


def with_head(critic: Critic, seed: int = 5) -> Critic:
    """The critic with a head that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head = critic.module.value_head
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.25)
    return critic


def gradient(critic: Critic) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in critic.module.parameters()])


# ---- the values -----------------------------------------------------------------------------------------------------


def test_values_are_zero_at_first_and_then_those_of_the_hidden_state_before_each_token(make: SimpleNamespace) -> None:
    policy = make.policy(dtype="float64")
    critic = Critic(policy, CriticConfig())
    made = make.group(1, [1.0, 0.0], turns=(2, 3), masked_tokens=True)
    mini = mini_of(policy, made)
    assert critic.values(mini.micro_batches, len(mini)).tolist() == [0.0] * len(mini)
    with_head(critic)
    found = critic.values(mini.micro_batches, len(mini))
    backbone, head = policy.model.base_model, critic.module.value_head  # the critic's own backbone is a copy of it
    expected = []
    for trajectory in made:
        for step in trajectory.steps:
            ids = torch.tensor(step.full_ids[None], dtype=torch.int64)
            hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
            places = len(step.prompt_ids) + np.flatnonzero(step.loss_mask) - 1
            expected += (hidden[places] @ head.weight[0] + head.bias).tolist()
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)  # norms in transformers are in float32


def test_it_begins_as_a_copy_of_the_policy_and_is_trained_apart_from_it(make: SimpleNamespace) -> None:
    for architecture in ("qwen3", "llama"):  # tied and untied
        policy = make.policy(architecture)
        critic = Critic(policy, CriticConfig(optimizer=QUICK))
        own = dict(critic.module.model.named_parameters())
        theirs = dict(policy.model.named_parameters())
        assert set(own) == {name for name in theirs if name != "lm_head.weight"}
        assert all(torch.equal(own[name], theirs[name]) for name in own)
        before = {name: p.clone() for name, p in theirs.items()}
        mini = mini_of(policy, make.group(1, [1.0, 0.0]))
        mini.values, mini.returns = torch.zeros(len(mini)), torch.ones(len(mini))
        with_head(critic).update(mini)
        assert all(torch.equal(theirs[name], before[name]) for name in theirs)
        assert not any(torch.equal(own[name], before[name]) for name in own)


def test_under_lora_it_is_a_frozen_copy_with_an_adapter_of_its_own(make: SimpleNamespace) -> None:
    config = PolicyConfig(device="cpu", lora=LoRAConfig(rank=2, dropout=0.5))
    policy = Policy(make.model("llama"), config)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    critic = with_head(Critic(policy, CriticConfig(optimizer=QUICK)))
    theirs = dict(policy.model.named_parameters())
    own = critic.module.model.state_dict()
    assert any("lora_B" in name for name in own)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in own.items())
    assert not {id(p) for p in critic.module.parameters()} & {id(p) for p in policy.model.parameters()}
    trained = {name for name, p in critic.module.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[0] for name in trained if "lora_" not in name} == {"value_head"}
    assert any("lora_A" in name for name in trained)
    mini = mini_of(policy, make.group(1, [1.0, 0.0]))
    with policy.training():  # dropout is the policy's, and for its gradient only
        values = [critic.values(mini.micro_batches, len(mini)) for _ in range(2)]
    assert torch.equal(*values)
    mini.values, mini.returns = values[0], torch.ones(len(mini))
    frozen = {name: p.clone() for name, p in critic.module.named_parameters() if not p.requires_grad}
    critic.update(mini)
    after = dict(critic.module.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())


def test_a_model_of_its_own(make: SimpleNamespace, tmp_path: Path) -> None:
    make.model("llama", seed=9).save_pretrained(tmp_path / "llama")
    critic = Critic(make.policy("qwen3"), CriticConfig(path=str(tmp_path / "llama")))
    loaded = make.model("llama", seed=9).base_model.state_dict()
    found = critic.module.model.base_model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in loaded.items())
    make.model("llama", vocab_size=90).save_pretrained(tmp_path / "other")
    with pytest.raises(
        UserError, match=r"^algorithm.critic.path: .* a vocabulary of 90 tokens, and the policy one of 89"
    ):
        Critic(make.policy(), CriticConfig(path=str(tmp_path / "other")))
    with pytest.raises(UserError, match=r"^algorithm.critic.path: model '.*nowhere' cannot be loaded: "):
        Critic(make.policy(), CriticConfig(path=str(tmp_path / "nowhere")))


# ---- the loss -------------------------------------------------------------------------------------------------------


def test_the_value_loss_by_hand() -> None:
    values = torch.tensor([0.5, 1.0, -1.0, 0.1], requires_grad=True)
    before, returns = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 0.0])
    # Held within 0.2 of before: 0.2, 0.2, -0.2, 0.1. Larger error of the two, squared, halved: (1 - 0.2)^2 / 2 = 0.32
    # twice; the third moved the wrong way, (1 + 1)^2 / 2 = 2, and is pulled back; the fourth moved little.
    losses, clipped = value_loss(values, before, returns, 0.2)
    assert losses.tolist() == pytest.approx([0.32, 0.32, 2.0, 0.005])
    assert clipped.tolist() == [True, True, False, False]
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, -2.0, 0.1])
    losses, clipped = value_loss(values, before, returns, None)
    assert losses.tolist() == pytest.approx([0.125, 0.0, 2.0, 0.005])
    assert not clipped.any()


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])  # variance 5 / 3
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 7, returns) == pytest.approx(1.0)  # a constant error leaves no variance
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) is None
    assert explained_variance(torch.zeros(0), torch.zeros(0)) is None


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_is_that_of_one_step_at_a_time_in_every_layout_at_every_budget(
    make: SimpleNamespace, architecture: str, dtype: str
) -> None:
    made = make.group(3, [1.0, 0.0, 0.5], turns=(1, 4, 3), breaks=(2,), masked_tokens=True)
    made += make.group(4, [1.0, 0.0], task="other", temperature=0.7)
    # Two samples that said the same, and were worth something else: one prediction, two targets.
    made += [make.trajectory(6, task="same", sample=s, reward=r, turns=2) for s, r in ((0, 1.0), (0, -1.0))]
    made[-1] = replace(made[-1], id=replace(made[-1].id, sample=1))
    found = {}
    for layout, budget in (("steps", 1), ("steps", 300), ("merged", 40), ("tree", 10**6), ("tree", 40), ("tree", 1)):
        policy = make.policy(architecture, dtype=dtype, budget=budget, layout=layout)
        critic = with_head(Critic(policy, CriticConfig()))
        mini = mini_of(policy, made)
        mini.values = critic.values(mini.micro_batches, len(mini))
        mini.returns = torch.linspace(-3, 3, len(mini), dtype=torch.float64)
        critic.backward(mini)
        found[layout, budget] = gradient(critic)
    exact = found.pop(("steps", 1))
    limit = 1e-5 if dtype == "float32" else 1e-6  # norms in transformers are in float32 whatever the weights are
    for where, other in found.items():
        assert (other - exact).norm() / exact.norm() < limit, where


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradient(make: SimpleNamespace) -> None:
    made, found = make.group(1, [1.0, 0.0, 0.5]), []
    for compile_ in ("none", "layers"):
        policy = Policy(make.model(), PolicyConfig(device="cpu", compile=compile_))
        critic = with_head(Critic(policy, CriticConfig()))
        mini = mini_of(policy, made)
        mini.values = critic.values(mini.micro_batches, len(mini))
        mini.returns = torch.linspace(-1, 1, len(mini))
        critic.backward(mini)
        found.append(gradient(critic))
    assert (found[1] - found[0]).norm() / found[0].norm() < 1e-5


@pytest.mark.parametrize("lora", [False, True])
def test_it_learns_the_returns_of_a_fixed_batch(make: SimpleNamespace, lora: bool) -> None:
    config = PolicyConfig(device="cpu", lora=LoRAConfig(rank=4) if lora else None)
    policy = Policy(make.model(), config)
    critic = Critic(policy, CriticConfig(optimizer={"learning_rate": 1e-2}, clip=None))
    rewards = {"a": 1.0, "b": 0.0, "c": -1.0, "d": 1.0, "e": -1.0, "f": 0.0}  # told by the prompt
    made = [make.trajectory(ord(task), task=task, reward=r, turns=2) for task, r in rewards.items()]
    mini = mini_of(policy, made)
    mini.values = critic.values(mini.micro_batches, len(mini))
    mini.returns = torch.tensor([*rewards.values()])[mini.trajectory]
    first = critic.update(mini)
    for _ in range(60):
        last = critic.update(mini)
    values = critic.values(mini.micro_batches, len(mini))
    assert first["value_loss"] == pytest.approx(0.5 * float(mini.returns.square().mean()))
    assert last["value_loss"] < 0.1 * first["value_loss"]
    assert explained_variance(values, mini.returns) > 0.9
    assert last["value_clip_fraction"] == 0.0


# ---- within a learner -----------------------------------------------------------------------------------------------


def gae_config(critic: dict[str, Any] | None = None, **fields: Any) -> LearnerConfig:
    credit = fields.pop("credit", {"kind": "gae", "whiten": False})
    given = {"optimizer": QUICK, **(critic or {})}
    return LearnerConfig(**{"credit": credit, "critic": given, "optimizer": QUICK, **fields})


def test_advantages_are_gaes_of_the_values_before_the_update(make: SimpleNamespace) -> None:
    made = make.group(1, [1.0, -1.0], turns=(1, 3), masked_tokens=True)
    policy = make.policy()
    config = gae_config(credit={"kind": "gae", "gamma": 0.9, "gae_lambda": 0.8, "whiten": False})
    learner = Learner(policy, config)
    assert learner.critic is not None
    with_head(learner.critic)
    (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
    assert mini.values is not None
    values, start = mini.values.double().numpy(), 0
    for trajectory in made:
        counts = [int(step.loss_mask.sum()) for step in trajectory.steps]
        rewards = np.zeros(sum(counts))
        rewards[-1] += trajectory.reward
        own = np.append(values[start : start + sum(counts)], 0.0)
        expected, after = np.zeros(len(rewards)), 0.0
        for t in reversed(range(len(rewards))):
            after = rewards[t] + 0.9 * own[t + 1] - own[t] + 0.9 * 0.8 * after
            expected[t] = after
        part = slice(start, start + sum(counts))
        assert mini.advantage is not None
        assert mini.returns is not None
        assert mini.advantage[part].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        assert mini.returns[part].tolist() == pytest.approx((expected + own[:-1]).tolist(), abs=1e-6)
        start += sum(counts)
    assert start == len(mini)


def test_advantages_do_not_depend_on_layout_or_mini_batches(make: SimpleNamespace) -> None:
    """Whitening is over the batch, however it is split; the same tokens get the same."""
    made = [t for task in "abc" for t in make.group(ord(task), [1.0, 0.0], task=task)]
    found = []
    for layout, parts in (("steps", 1), ("merged", 1), ("tree", 3)):
        learner = Learner(make.policy(layout=layout), gae_config(credit="gae", mini_batches=parts))
        assert learner.critic is not None
        with_head(learner.critic)
        mini_batches, _ = learner.prepare(treat(made, OutcomePolicy())[0])
        by_task: dict[str, list[float]] = {}
        for mini in mini_batches:
            for number, signal in enumerate(mini.signals):
                assert mini.advantage is not None
                by_task[signal.group.key[2]] = mini.advantage[mini.group == number].tolist()
        found.append([value for task in "abc" for value in by_task[task]])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)
    assert np.mean(found[0]) == pytest.approx(0, abs=1e-6)
    assert np.std(found[0], ddof=1) == pytest.approx(1, abs=1e-3)


def test_every_group_teaches_and_both_models_move(make: SimpleNamespace) -> None:
    made = make.group(1, [1.0, 1.0]) + make.group(2, [0.0], task="alone")
    learner = Learner(make.policy(), gae_config(mini_batches=2, epochs=2))
    assert learner.critic is not None
    policy_before = [p.clone() for p in learner.policy.model.parameters()]
    report = learner.update(made)
    assert (report.updates, learner.updates, learner.critic.optimizer.updates) == (4, 4, 4)
    assert not any(torch.equal(a, b) for a, b in zip(policy_before, learner.policy.model.parameters(), strict=True))
    metrics = report.metrics
    assert metrics["zero_variance_groups"] == 0
    assert (metrics["value_mean"], metrics["explained_variance"]) == (0.0, 0.0)
    assert 0 < metrics["return_mean"] < 1
    assert metrics["value_loss"] > 0
    assert metrics["critic_grad_norm"] > 0
    assert 0 <= metrics["value_clip_fraction"] <= 1


def test_while_the_critic_warms_up_the_policy_stays(make: SimpleNamespace) -> None:
    learner = Learner(make.policy(), gae_config({"warmup_batches": 2}, total_updates=5))
    assert learner.critic is not None
    assert learner.critic.optimizer.total_updates == 7
    made = make.group(1, [1.0, 0.0, 0.5])
    before = [p.clone() for p in learner.policy.model.parameters()]
    reports = [learner.update(made) for _ in range(3)]
    assert [report.updates for report in reports] == [0, 0, 1]
    assert [report.metrics["updates"] for report in reports] == [0, 0, 1]
    assert learner.critic.optimizer.updates == 3
    assert reports[1].metrics["value_loss"] > 0
    assert "loss" not in reports[1].metrics
    assert not all(torch.equal(a, b) for a, b in zip(before, learner.policy.model.parameters(), strict=True))
    untouched = Learner(make.policy(), gae_config({"warmup_batches": 2}))
    untouched.update(made)
    assert all(torch.equal(a, b) for a, b in zip(before, untouched.policy.model.parameters(), strict=True))


def test_the_kl_in_the_reward_costs_each_token_its_own(make: SimpleNamespace) -> None:
    made = make.group(1, [1.0, 0.0])
    policy, reference = make.policy(), make.policy(seed=3)
    learner = Learner(policy, gae_config(kl={"kind": "k1", "coef": 0.5, "applies_to": "reward"}), reference)
    (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
    assert mini.old_logprob is not None
    assert mini.reference_logprob is not None
    assert mini.returns is not None
    cost = 0.5 * (mini.old_logprob - mini.reference_logprob).double().numpy()
    for number, trajectory in enumerate(made):
        own = (mini.trajectory == number).numpy()
        # Values are zero and nothing is discounted: the return is the reward less the KL of this token and later ones.
        expected = trajectory.reward - np.cumsum(cost[own][::-1])[::-1]
        assert mini.returns.numpy()[own] == pytest.approx(expected, abs=1e-5)


def test_trajectories_that_branch_are_refused_before_anything_is_computed(make: SimpleNamespace) -> None:
    learner = Learner(make.policy(), gae_config())
    broken = [*make.group(1, [1.0]), make.trajectory(2, sample=1, turns=3, breaks=(1,))]
    with pytest.raises(
        UserError, match=r"^trajectory train/0/task/1/0, step 1: credit gae runs over the tokens of one"
    ):
        learner.update(broken)


def test_the_seed_decides_how_the_adapter_of_a_critic_with_a_model_of_its_own_begins(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    make.model(seed=9).save_pretrained(tmp_path)

    def adapter_of(seed: int) -> torch.Tensor:
        policy = Policy(make.model(), PolicyConfig(device="cpu", lora=LoRAConfig(rank=2)))
        critic = Learner(policy, gae_config({"path": str(tmp_path)}, seed=seed)).critic
        assert critic is not None
        return torch.cat([p.flatten() for name, p in critic.module.named_parameters() if "lora_A" in name])

    assert torch.equal(adapter_of(1), adapter_of(1))
    assert not torch.equal(adapter_of(1), adapter_of(2))


def test_a_critic_that_diverged_is_named(make: SimpleNamespace) -> None:
    learner = Learner(make.policy(), gae_config())
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.module.value_head.bias.fill_(torch.inf)
    with pytest.raises(UserError, match=r"^the critic's values are not finite: it has diverged; .*learning_rate$"):
        learner.update(make.group(1, [1.0, 0.0]))


def test_metrics_without_anything_to_train_on(make: SimpleNamespace) -> None:
    learner = Learner(make.policy(), gae_config())
    report = learner.update([])
    assert report.updates == 0
    assert "explained_variance" not in report.metrics


@pytest.mark.parametrize("lora", [False, True])
def test_it_goes_on_from_its_state_as_if_it_had_never_stopped(
    make: SimpleNamespace, lora: bool, tmp_path: Path
) -> None:
    made = make.group(1, [1.0, 0.0, 0.5])
    config = gae_config({"optimizer": {**QUICK, "decay": "linear"}}, total_updates=6, mini_batches=1, epochs=2)

    def learner_of() -> Learner:
        held = PolicyConfig(device="cpu", lora=LoRAConfig(rank=2) if lora else None)
        return Learner(Policy(make.model(), held), config)

    def weights(learner: Learner) -> list[torch.Tensor]:
        assert learner.critic is not None
        return [p.detach().clone() for m in (learner.policy.model, learner.critic.module) for p in m.parameters()]

    unbroken, killed, resumed = learner_of(), learner_of(), learner_of()
    store = CheckpointStore(tmp_path)
    for learner in (unbroken, killed):
        learner.update(made)
    store.save(killed)
    store.restore(resumed)
    for learner in (unbroken, resumed):
        report = learner.update(made)
    assert all(torch.equal(a, b) for a, b in zip(weights(unbroken), weights(resumed), strict=True))
    assert report.metrics["value_mean"] != 0.0
    assert not all(torch.equal(a, b) for a, b in zip(weights(killed), weights(resumed), strict=True))


def test_a_state_that_is_not_its_own_is_refused(make: SimpleNamespace) -> None:
    one, other = (Critic(make.policy(architecture), CriticConfig()) for architecture in ("qwen3", "llama"))
    with pytest.raises(ValueError, match="the critic's state is that of another model"):
        one.load_state_dict(other.state_dict())
    wider = Critic(Policy(make.model(intermediate_size=32), PolicyConfig(device="cpu")), CriticConfig())
    with pytest.raises(ValueError, match=r"the critic's .* is \[32, 16\] in the state and \[24, 16\] here"):
        one.load_state_dict(wider.state_dict())


# ---- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"credit": "gae"},
            r"credit 'gae' needs a critic: add `critic: \{\}`, or use a credit without one, such as grpo",
        ),
        ({"critic": {}}, r"'critic' has no effect with credit 'grpo', which needs no values; it goes with gae"),
        ({"credit": "gae", "critic": {}, "zero_variance": "keep"}, "'zero_variance' has no effect with credit 'gae'"),
        ({"credit": "gae", "critic": {"lr": 1}}, "lr"),
        ({"credit": "gae", "critic": {"clip": 0}}, "greater than 0"),
    ],
)
def test_a_critic_is_there_exactly_where_one_is_needed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**fields)


def test_a_models_own_credit_by_token() -> None:
    config = LearnerConfig(credit="stepgym.credit.gae:gae", critic={"warmup_batches": 1}, total_updates=3)
    assert config.credit_by_token
    assert config.critic_updates == 4
