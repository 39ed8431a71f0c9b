from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.config import validate
from stepgym.errors import UserError
from stepgym.train.config import LearnerConfig
from stepgym.train.optimizer import Optimizer, OptimizerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"credit": "td"}, r"credit 'td' does not fit step-wise data: .*: use gae with gae_lambda 0"),
        ({"credit": "gae"}, r"algorithm: credit 'gae' needs a critic: add `critic: {}`"),
        ({"credit": "gae", "critic": {"clp": 1}}, r"algorithm\.critic: unknown field 'clp'; did you mean 'clip'\?"),
        ({"credit": "grop"}, r"unknown credit 'grop'; did you mean 'grpo'\?"),
        ({"credit": {"kind": "grpo", "scale": True}}, r"credit: unknown field 'scale'"),
        ({"credit": {"gamma": 1}}, r"credit: expected a name or a mapping with 'kind'"),
        ({"loss": "ppo2"}, r"unknown loss 'ppo2'; did you mean 'ppo'\?"),
        ({"loss": {"kind": "ppo", "clip_high": -1}}, r"loss\.clip_high: expected greater than 0"),
        ({"correction": "truncate"}, r"correction: unknown correction 'truncate'; did you mean 'truncated'\?"),
        ({"correction": {"kind": "none", "cap": 2}}, r"correction: 'cap' has no effect with kind 'none'"),
        ({"kl": {"coef": 0.1}}, r"algorithm\.kl: 'coef' has no effect with kind 'none'"),
        ({"kl": "k4"}, r"algorithm\.kl: expected 'none', 'k1', 'k2' or 'k3'"),
        (
            {"reduction": "tokens"},
            r"algorithm\.reduction: expected 'token', 'step', 'trajectory', 'group' or 'constant'",
        ),
        ({"reduction": "constant"}, r"algorithm\.reduction: kind 'constant' needs 'tokens'"),
        ({"optimizer": {"learning_rat": 1}}, r"algorithm\.optimizer: unknown field 'learning_rat'; did you mean"),
        ({"mini_batch": 2}, r"algorithm: unknown field 'mini_batch'; did you mean 'mini_batches'\?"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_when_the_config_is_read(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        validate(LearnerConfig, fields, "algorithm")
    assert "\n" not in str(raised.value)


def test_a_config_reads_back_what_it_wrote() -> None:
    given_fields = {
        "credit": {"kind": "turn_returns", "gamma": 0.9},
        "loss": {"kind": "ppo", "clip_high": 0.28},
        "correction": "none",
        "kl": {"kind": "k3", "coef": 0.01},
    }
    for fields in ({}, given_fields):
        config = validate(LearnerConfig, fields, "algorithm")
        assert validate(LearnerConfig, config.model_dump(mode="json"), "algorithm") == config


def test_warm_up_and_decays_by_hand() -> None:
    linear = OptimizerConfig(learning_rate=1.0, warmup_updates=3, decay="linear", final_learning_rate=0.5)
    assert [linear.learning_rate_at(u, 8) for u in range(9)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    )
    cosine = OptimizerConfig(learning_rate=1.0, decay="cosine")
    assert [cosine.learning_rate_at(u, 3) for u in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    constant = OptimizerConfig(learning_rate=2.0, warmup_updates=1)
    assert [constant.learning_rate_at(u) for u in (0, 1, 1000)] == pytest.approx([1.0, 2.0, 2.0])


@given(st.integers(0, 20), st.integers(1, 50), st.sampled_from(["constant", "linear", "cosine"]))
def test_the_learning_rate_is_always_between_its_bounds(warmup: int, total: int, decay: str) -> None:
    final = 0.0 if decay == "constant" else 0.1
    config = OptimizerConfig(learning_rate=1.0, warmup_updates=warmup, decay=decay, final_learning_rate=final)
    rates = [config.learning_rate_at(update, total) for update in range(total + 5)]
    assert all(0 < rate <= 1.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_warm_up_over_a_share_of_the_updates_is_the_warm_up_over_as_many() -> None:
    share = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.285, decay="linear")
    count = OptimizerConfig(learning_rate=1.0, warmup_updates=573, decay="linear")  # of 2 x 1005 updates
    assert share.warmup(2010) == 573
    assert [share.learning_rate_at(u, 2010) for u in range(2010)] == [
        count.learning_rate_at(u, 2010) for u in range(2010)
    ]
    with pytest.raises(UserError, match="'warmup_updates' and 'warmup_ratio' exclude each other"):
        validate(OptimizerConfig, {"warmup_updates": 3, "warmup_ratio": 0.1}, "optimizer")
    with pytest.raises(UserError, match="warmup_ratio needs total_updates"):
        Optimizer([torch.nn.Parameter(torch.ones(2))], OptimizerConfig(warmup_ratio=0.1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"final_learning_rate": 1e-7}, "'final_learning_rate' has no effect with decay 'constant'"),
        ({"decay": "linear", "final_learning_rate": 1e-5}, "'final_learning_rate' is over 'learning_rate', 1e-06"),
        ({"betas": [1.5, 0.9]}, r"optimizer\.betas"),
        ({"betas": [0.9, 1.0]}, r"optimizer\.betas"),
    ],
)
def test_what_the_optimizer_cannot_do_is_refused_when_the_config_is_read(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        validate(OptimizerConfig, fields, "optimizer")
    assert "\n" not in str(refused.value)


def test_a_decay_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="decay 'cosine' needs total_updates"):
        Optimizer([torch.nn.Parameter(torch.ones(2))], OptimizerConfig(decay="cosine"))


def test_one_step_of_adamw_with_clipping_and_decay_by_hand() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(1, 2)), torch.nn.Parameter(torch.ones(2))
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, eps=1.0, max_grad_norm=1.0)
    optimizer = Optimizer([matrix, vector], config)
    matrix.grad, vector.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([0.0, 4.0])
    assert optimizer.step() == pytest.approx(5.0)
    # Clipped to 0.6 and 0.8; the first step of Adam moves by lr * g / (|g| + eps); only the matrix decays, by lr * 0.5.
    assert matrix[0].tolist() == pytest.approx([0.95 - 0.1 * 0.6 / 1.6, 0.95])
    assert vector.tolist() == pytest.approx([1.0, 1.0 - 0.1 * 0.8 / 1.8])
    assert optimizer.updates == 1
    assert matrix.grad is None


def test_a_gradient_that_is_not_finite_makes_no_update() -> None:
    weight = torch.nn.Parameter(torch.ones(1, 1))
    optimizer = Optimizer([weight], OptimizerConfig(learning_rate=0.1))
    weight.grad = torch.tensor([[math.nan]])
    assert math.isnan(optimizer.step())
    assert (weight.item(), optimizer.updates, weight.grad) == (1.0, 0, None)


def test_an_estimator_of_the_kl_whose_gradient_is_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="k1 in the loss has a gradient of zero on average; use k2 or k3"):
        LearnerConfig(kl="k1")  # type: ignore[arg-type]
    assert LearnerConfig(kl={"kind": "k1", "applies_to": "reward"}).scored_before_credit  # type: ignore[arg-type]
