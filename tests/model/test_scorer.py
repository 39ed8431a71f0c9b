"""Logprobs of given tokens, against the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stepgym.errors import UserError
from stepgym.model.scorer import ScoredRow, Scorer


def make_model(kind: str) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    made: Any = transformers
    return getattr(made, f"{kind}ForCausalLM")(getattr(made, f"{kind}Config")(**sizes)).eval()


def make_rows(count: int) -> list[ScoredRow]:
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(count):
        length = int(rng.integers(3, 40))
        position = np.flatnonzero(rng.random(length) < 0.5)
        position = position[position > 0]
        heat = np.full(len(position), rng.choice([0.7, 1.0, 1.3]), np.float32)
        rows.append(ScoredRow(rng.integers(0, 61, length).astype(np.int32), position, heat))
    return rows


def expected(model: Any, row: ScoredRow) -> Any:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(row.ids[None].astype(np.int64))).logits[0].double()
    heat = torch.tensor(row.temperature).double()
    scores = torch.log_softmax(logits[row.position - 1] / heat[:, None], -1)
    return scores[torch.arange(len(row.position)), torch.tensor(row.ids[row.position].astype(np.int64))].numpy()


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2"])
def test_scores_are_the_models_own(kind: str) -> None:
    """Gemma caps its logits, so its head is more than a projection."""
    model = make_model(kind)
    rows = make_rows(20)
    for row, scores in zip(rows, Scorer(model, device="cpu", batch_tokens=100).logprobs(rows), strict=True):
        np.testing.assert_allclose(scores, expected(model, row), atol=2e-5)


def test_a_row_longer_than_a_batch_goes_alone() -> None:
    model, rows = make_model("Qwen3"), make_rows(3)
    small = Scorer(model, device="cpu", batch_tokens=2).logprobs(rows)
    large = Scorer(model, device="cpu").logprobs(rows)
    for one, other in zip(small, large, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    model, rows = make_model("Qwen3"), make_rows(2)
    model.save_pretrained(tmp_path / "model")
    scorer = Scorer.load(tmp_path / "model", device="cpu")
    assert scorer.vocabulary == 61
    np.testing.assert_allclose(scorer.logprobs(rows)[0], expected(model, rows[0]), atol=2e-5)


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        Scorer.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot be loaded"):
        Scorer.load(tmp_path)
    with pytest.raises(UserError, match="cannot be used"):
        Scorer(make_model("Qwen3"), device="cuda:99")
