"""A model that only scores: the logprobs it gives to the tokens of sequences, without gradients.

The trainer's `Policy` computes the same numbers with gradients; this is for looking at what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.model.lengths import cut_by_length
from stepgym.model.logprobs import scores_from_logits, token_scores
from stepgym.model.output_head import find_head_form
from stepgym.model.placement import place
from stepgym.model.progress_bars import quiet_transformers
from stepgym.record.step import Ids

ScorerDtype = Literal["float32", "bfloat16", "float64"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ScoredRow(NamedTuple):
    """A sequence, and which of its tokens are scored.

    Attributes:
        ids: int32 [L].
        position: int64 [K], where each scored token stands; at least 1, since the token before predicts it.
        temperature: float32 [K], above 0.
    """

    ids: Ids
    position: NDArray[np.int64]
    temperature: NDArray[np.float32]


class Scorer:
    """Scores tokens with a causal language model of `transformers`.

    Args:
        model: The model; it is put on the device, in evaluation mode.
        device: A torch device; `auto` is `cuda` where there is one.
        dtype: Type of the weights.
        batch_tokens: Most tokens, padding included, of one forward pass.
    """

    def __init__(
        self, model: Any, *, device: str = "auto", dtype: ScorerDtype = "float32", batch_tokens: int = 16384
    ) -> None:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            self.device = torch.device(name)
            self.model = place(model, self.device, _DTYPES[dtype]).eval()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"device {device!r} cannot be used: {reason}; use cpu, cuda, cuda:0, ...") from None
        self.batch_tokens = batch_tokens
        self._head_form = find_head_form(self.model)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Scorer:
        """Load a model from a folder or a hub name. Raises `UserError` where there is none."""
        from transformers import AutoModelForCausalLM

        if str(path).startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
            raise UserError(f"model: there is no folder {path}")
        try:
            folder = Path(path).expanduser()
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(str(folder if folder.is_dir() else path), dtype="float32")
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"model {str(path)!r} cannot be loaded: {reason}") from None
        return cls(model, **options)

    @property
    def vocabulary(self) -> int:
        """Number of ids that the model knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def logprobs(self, rows: Sequence[ScoredRow]) -> list[NDArray[np.float64]]:
        """float64 [K] for each row: log-softmax(logits / temperature) of its scored tokens."""
        lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        found: list[NDArray[np.float64]] = [np.zeros(0)] * len(rows)
        for start, end in cut_by_length(lengths[order], self.batch_tokens):
            picked = order[start:end]
            scores = self._score([rows[index] for index in picked])
            ends = np.cumsum([len(rows[index].position) for index in picked])
            for index, piece in zip(picked, np.split(scores, ends[:-1]), strict=True):
                found[index] = piece
        return found

    @torch.no_grad()
    def _score(self, rows: Sequence[ScoredRow]) -> NDArray[np.float64]:
        # Padding stands on the right, where causal attention never looks, so no mask is needed.
        width = max(len(row.ids) for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = row.ids
        place = np.concatenate([index * width + row.position for index, row in enumerate(rows)])
        targets = torch.from_numpy(ids.reshape(-1)[place]).to(self.device)
        before = torch.from_numpy(place - 1).to(self.device)
        temperature = torch.from_numpy(np.concatenate([row.temperature for row in rows])).to(self.device)
        inputs = torch.from_numpy(ids).to(self.device)
        if self._head_form is not None:
            hidden = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
            head = self.model.get_output_embeddings()
            picked = hidden.flatten(0, 1).index_select(0, before)
            scores = token_scores(
                picked, head.weight, targets, bias=head.bias, form=self._head_form, temperature=temperature
            )
        else:
            logits = self.model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).index_select(0, before)
            scores = scores_from_logits(logits, targets, temperature)
        return np.asarray(scores.logprob.double().cpu().numpy())
