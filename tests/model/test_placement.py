"""Weights get the type that is asked for, and rotary frequencies are not rounded with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from stepgym.model.placement import place
from stepgym.model.scorer import Scorer
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip


def qwen3() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def frequencies(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.model.rotary_emb.inv_freq
    return found


@pytest.mark.parametrize(
    "placed",
    [
        lambda model: place(model, CPU, torch.bfloat16),
        lambda model: Policy(model, PolicyConfig(device="cpu", dtype="bfloat16")).model,
        lambda model: Scorer(model, device="cpu", dtype="bfloat16").model,
    ],
    ids=["place", "policy", "scorer"],
)
def test_frequencies_are_those_of_the_formula_in_bfloat16_too(placed: Callable[[Any], Any], tmp_path: Path) -> None:
    model = placed(qwen3())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = [10000.0 ** (-2 * k / 16) for k in range(8)]
    assert frequencies(model).tolist() == pytest.approx(exact, rel=1e-6)
    # And so they are where transformers loads the same weights in that type.
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(frequencies(loaded), frequencies(model))


def test_a_wider_type_is_for_all() -> None:
    model = place(qwen3(), CPU, torch.float64)
    assert {tensor.dtype for tensor in [*model.parameters(), frequencies(model)]} == {torch.float64}


def test_a_model_with_other_buffers_computes() -> None:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))  # scales its embeddings by a buffer
    ids = torch.arange(20)[None] % 50
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        rough = place(model, CPU, torch.bfloat16)(input_ids=ids).logits
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() < 0.05 * exact.norm()
