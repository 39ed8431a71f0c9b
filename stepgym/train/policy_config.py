"""How the trained model is held and computed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from stepgym.train.lora import LoRAConfig
from stepgym.train.packs.micro_batch import Layout


class PolicyConfig(BaseModel):
    """How the model is held and computed. Apart from `dtype`, `autocast` and `lora` none of it changes what is learned.

    Attributes:
        device: A torch device such as `cpu` or `cuda:0`; `auto` is `cuda` where there is one.
        dtype: Type of the weights. Keep float32 and let `autocast` compute in bfloat16: an optimizer step at a small
            learning rate is lost in bfloat16 weights.
        autocast: `bfloat16` computes matrix products in bfloat16, `none` in the type of the weights; `auto` is
            `bfloat16` on CUDA and `none` on the CPU.
        layout: What of the steps of an update is computed once. `tree`: every prefix that steps share, across turns and
            across the samples of a task; `merged`: steps of a trajectory that extend one another; `steps`: nothing;
            `auto`: `tree`, or `merged` for models that cannot branch (recurrent and linear-attention layers), and for
            updates of short paths that share little on the CPU.
        attention: The kernel for forests: `flex` (FlexAttention, on CUDA), `segments` (on the CPU), `auto` by device.
        gradient_checkpointing: Keep only each layer's input and compute the rest again on the way back: less memory,
            about a third more time.
        micro_batch_tokens: Most tokens of one forward and backward pass.
        compile: `layers` compiles each decoder layer with torch.compile; `auto` does so on CUDA; or `none`.
        lora: Train a low-rank adapter (`stepgym.train.lora.LoRAConfig`) and leave the model's own weights as they are;
            null trains all weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    autocast: Literal["auto", "none", "bfloat16"] = "auto"
    layout: Literal["auto"] | Layout = "auto"
    attention: Literal["auto", "segments", "flex"] = "auto"
    gradient_checkpointing: bool = False
    micro_batch_tokens: int = Field(default=16384, gt=0)
    compile: Literal["auto", "none", "layers"] = "auto"
    lora: LoRAConfig | None = None
