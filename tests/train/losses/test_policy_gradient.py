"""REINFORCE, and cross-entropy; and that losses agree where theory says that they must."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stepgym.train.losses import LOSSES
from stepgym.train.losses.cross_entropy import cross_entropy, filtered_cross_entropy
from stepgym.train.losses.reinforce import reinforce


def test_reinforce_by_hand(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.0, 2.0], [2.0, -3.0], old=[-0.5, -2.0])
    loss = reinforce(tokens)
    assert loss.values.tolist() == pytest.approx([1.0, 3 * (-2 + math.log(2))])
    assert slopes(tokens, loss) == pytest.approx([-2.0, 3.0])  # -A, whatever the ratio


def test_cross_entropy_is_the_negative_log_likelihood() -> None:
    assert cross_entropy(torch.log(torch.tensor([0.5, 1.0]))).tolist() == pytest.approx([math.log(2), 0.0])


def test_filtered_cross_entropy_imitates_what_did_better_than_its_baseline(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.0, 1.0, 1.0], [0.1, 0.0, -5.0], old=[-2.0, -3.0, -4.0])
    loss = filtered_cross_entropy(tokens)
    assert loss.values.tolist() == [2.0, 0.0, 0.0]
    assert slopes(tokens, loss) == [-1.0, 0.0, 0.0]
    assert loss.metrics["imitated"].tolist() == [True, False, False]
    everything = filtered_cross_entropy(tokens, only_positive=False)
    assert everything.values.tolist() == [2.0, 3.0, 4.0]
    assert slopes(tokens, everything) == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "reinforce"])
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(name: str, tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.0] * 5, [1.0, -2.0, 0.0, 0.5, -0.1], step=[0, 0, 1, 2, 2], old=[-1.0, -0.2, -3.0, -0.7, -9.0])
    assert slopes(tokens, LOSSES.get(name)(tokens)) == pytest.approx([-1.0, 2.0, 0.0, -0.5, 0.1])
