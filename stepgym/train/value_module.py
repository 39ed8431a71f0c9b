"""A model with a head of one number: what a critic computes with."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from stepgym.train.forward_module import ForwardModule
from stepgym.train.packs.micro_batch import MicroBatch


class ValueModule(ForwardModule):
    """Backbone, the rows that predict, and one number for each, all within one `forward`.

    The head for tokens is taken off the model. The new one is zero, so that every value is 0 at first.

    Args:
        model: A causal language model of `transformers`.
        attention: The kernel for forests, as of `ForwardModule`.
    """

    def __init__(self, model: Any, attention: ModuleType) -> None:
        super().__init__(model, attention)
        model.set_output_embeddings(torch.nn.Identity())
        width = model.config.get_text_config().hidden_size
        self.value_head = torch.nn.Linear(width, 1, dtype=model.dtype, device=model.device)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:  # type: ignore[override]
        """The value of the state that each trained token of a micro-batch was sampled in, in its order.

        Args:
            micro_batch: What to compute; its tensors may lie on another device.

        Returns:
            Tensor [M] on the model's device, float32 (float64 for a float64 model).
        """
        device = self.model.device
        hidden = self._run(self.model.base_model, micro_batch).last_hidden_state.flatten(0, 1)
        rows = hidden.index_select(0, micro_batch.place.to(device, non_blocking=True))
        # Sums in full precision: a matrix product would be rounded to bfloat16 under autocast.
        wide = torch.promote_types(rows.dtype, torch.float32)
        values: torch.Tensor = (rows.to(wide) * self.value_head.weight[0].to(wide)).sum(-1) + self.value_head.bias.to(
            wide
        )
        which = micro_batch.which
        return values if which is None else values.index_select(0, which.to(device, non_blocking=True))
