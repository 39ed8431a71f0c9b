"""What a model's output head does besides a projection."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class HeadForm(NamedTuple):
    """What a model does to the projection of its last hidden state: logits = cap * tanh(scale * projection / cap).

    Attributes:
        scale: A factor (Granite, Cohere); 1 for most models.
        cap: A soft cap (Gemma 2 and later), or None: logits = scale * projection.
    """

    scale: float = 1.0
    cap: float | None = None

    def logits(self, projection: Tensor) -> Tensor:
        """The logits, in place."""
        if self.scale != 1.0:
            projection.mul_(self.scale)
        return projection if self.cap is None else projection.div_(self.cap).tanh_().mul_(self.cap)


PLAIN = HeadForm()
"""Logits are the projection."""


@torch.no_grad()
def find_head_form(model: Any) -> HeadForm | None:
    """What a model does to the projection of its last hidden state; None where that is none of what `HeadForm` can say.

    Only where there is one can `token_scores` stand in for the model's own head. Its numbers are read from the
    model's config, and then tried.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return None
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    divisor = getattr(config, "logits_scaling", None)
    form = HeadForm(
        float(scale or 1.0) / float(divisor or 1.0),
        getattr(config, "final_logit_softcapping", None),
    )
    ids = torch.arange(4, device=head.weight.device)[None] % config.vocab_size
    logits = model(input_ids=ids, use_cache=False).logits
    projection = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    exact = logits.to(projection.dtype)
    for guess in (form, PLAIN):
        found = guess.logits(projection.clone())
        rounding = 4 * torch.finfo(exact.dtype).eps * float(exact.abs().max())
        if float((found - exact).abs().max()) <= rounding:
            return guess
    return None
