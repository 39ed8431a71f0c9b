from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch

from stepgym.config import validate_kwargs
from stepgym.errors import UserError
from stepgym.plugins import Registry
from stepgym.train.corrections import CORRECTIONS
from stepgym.train.losses import KLS, LOSSES
from stepgym.train.losses.tokens import TokenLoss, Tokens, couples, ratio_of, unit_of


def test_a_declaration_says_within_what_a_function_couples_tokens() -> None:
    @couples("step")
    def declared(tokens: Tokens) -> TokenLoss:
        return TokenLoss(tokens.logprob)

    assert unit_of(declared, {}) == "step"
    with pytest.raises(UserError, match=r"couples: unknown unit 'steps'; did you mean 'step'\?; known: token, step"):
        couples("steps")  # type: ignore[arg-type]


def test_the_option_unit_goes_before_the_declaration() -> None:
    @couples("token")
    def chosen(tokens: Tokens, *, unit: Literal["step", "trajectory"] = "step") -> TokenLoss:
        return TokenLoss(tokens.logprob)

    assert unit_of(chosen, {}) == "step"
    assert unit_of(chosen, {"unit": "trajectory"}) == "trajectory"
    assert unit_of(partial(chosen, unit="trajectory"), {}) == "trajectory"
    with pytest.raises(UserError, match="chosen: unknown unit 'row'"):
        unit_of(chosen, {"unit": "row"})


def test_who_declares_nothing_is_taken_to_couple_the_whole_batch() -> None:
    def silent(tokens: Tokens) -> TokenLoss:
        return TokenLoss(tokens.logprob - tokens.logprob.mean())

    assert unit_of(silent, {}) == "batch"


def test_the_units_of_what_is_built_in() -> None:
    losses = {name: unit_of(LOSSES.get(name), {}) for name in LOSSES}
    assert losses == {
        "ppo": "token", "gspo": "step", "cispo": "token", "sapo": "token", "reinforce": "token",
        "cross_entropy": "token",
    }  # fmt: skip
    corrections = {name: unit_of(CORRECTIONS.get(name), {}) for name in CORRECTIONS}
    assert corrections == {
        "truncated": "token", "masked": "token", "sequence_truncated": "step", "geometric_mask": "step",
    }  # fmt: skip
    for name in ("sequence_truncated", "geometric_mask"):
        assert unit_of(CORRECTIONS.get(name), {"unit": "trajectory"}) == "trajectory"


def test_ratios_are_bounded() -> None:
    far = torch.tensor([-1e4, 0.0, 1e4])
    assert ratio_of(far, torch.zeros(3)).tolist() == pytest.approx([2.0611536e-09, 1.0, 4.8516520e08])


def test_registries_know_their_entries_and_suggest() -> None:
    assert LOSSES.names() == ["cispo", "cross_entropy", "gspo", "ppo", "reinforce", "sapo"]
    assert KLS.names() == ["k1", "k2", "k3"]
    with pytest.raises(UserError, match=r"unknown loss 'pppo'; did you mean 'ppo'\?"):
        LOSSES.get("pppo")


def test_user_code_adds_a_loss_with_a_decorator() -> None:
    registry: Registry[object] = Registry("loss", {})

    @registry.register("mine")
    def mine(tokens: Tokens) -> TokenLoss:
        return TokenLoss(-tokens.advantage * tokens.logprob)

    assert registry.get("mine") is mine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"clip_low": 0.0}),
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"clip_high": -0.1}),
        ("ppo", {"dual_clip": 1.0}),
        ("ppo", {"clip": 0.2}),
        ("gspo", {"unit": "token"}),
        ("gspo", {"unit": "batch"}),
        ("gspo", {"clip_low": 0.0}),
        ("cispo", {"clip_low": 1.1}),
        ("cispo", {"clip_high": 0.0}),
        ("sapo", {"tau_positive": 0.0}),
        ("sapo", {"tau_negative": -1.0}),
        ("sapo", {"tau": 1.0}),
        ("reinforce", {"clip_low": 0.2}),
        ("cross_entropy", {"only_positive": "maybe"}),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="loss"):
        validate_kwargs(LOSSES.get(name), options, "loss")


def test_every_function_answers_for_no_tokens() -> None:
    none = Tokens.none()
    for name in LOSSES:
        assert LOSSES.get(name)(none).values.shape == (0,)
    masks = {name for name in CORRECTIONS if CORRECTIONS.get(name)(none).keep is not None}
    assert masks == {"masked", "geometric_mask"}
