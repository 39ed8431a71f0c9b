"""Low-rank adapters: what is trained instead of the model's own weights (Hu et al. 2021, arXiv:2106.09685), by PEFT."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from stepgym.errors import UserError

logger = logging.getLogger(__name__)
_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"


class LoRAConfig(BaseModel):
    """An adapter beside linear layers: a layer of weight W computes with W + scale * B A.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: The scale is `alpha / rank`.
        rank_stabilized: The scale is `alpha / sqrt(rank)` instead (Kalajdzievski 2023, arXiv:2312.03732).
        dropout: Share of a layer's inputs that the adapter does not see while it is trained. Rollouts and the
            log-probabilities that an update starts from are computed without.
        target_modules: Names of the layers that get an adapter, as `q_proj` or `mlp.down_proj`; `auto`: every linear
            layer but the head.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    rank_stabilized: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["auto"] | tuple[str, ...] = "auto"


class Adapter:
    """An adapter within a model. The model computes with it from now on, and only the adapter's weights are trained.

    A new adapter changes nothing: its B is zero.

    Args:
        model: A causal language model of `transformers`; its linear layers are replaced in place.
        config: See `LoRAConfig`.
        seed: Seeds A; the global random state of torch is left as it was.

    Raises:
        UserError: PEFT is not installed, or no layer of the model has a name that the config asks for.
    """

    def __init__(self, model: Any, config: LoRAConfig, *, seed: int = 0) -> None:
        try:
            import peft
        except ImportError:
            raise UserError("policy.lora needs the package 'peft': pip install 'stepgym[train]'") from None
        targets = "all-linear" if config.target_modules == "auto" else list(config.target_modules)
        lora: Any = peft.LoraConfig  # alpha may be a fraction, whatever its type says
        options = lora(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            use_rslora=config.rank_stabilized,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        self.config = config
        self._model = model
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=list(devices)):
                torch.manual_seed(seed)
                self._peft: Any = peft.get_peft_model(model, options, adapter_name=_NAME)
        except ValueError as error:
            raise UserError(f"policy.lora: no adapter fits the model: {_first_line(error)}") from None
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")
        }
        ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        both = [name for name, module in self._layers.items() if id(module) in ends]
        if both and model.config.get_text_config().tie_word_embeddings:
            raise UserError(
                f"policy.lora.target_modules: {both[0]!r} has the weights of both the embedding and the head of "
                "this model, and an adapter would part them; leave it out"
            )
        adapted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        logger.info("adapter of rank %d on %d layers: %d weights are trained", config.rank, len(self._layers), adapted)

    def off(self) -> AbstractContextManager[Any]:
        """The model computes without the adapter within this block."""
        context: AbstractContextManager[Any] = self._peft.disable_adapter()
        return context

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The plain model's weights with the adapter added, one after the other, under the plain model's names.

        What the adapter does not touch is the model's own tensor; the rest is new, in the type of the model's weights.
        Neither the model nor the adapter changes.
        """
        for name, tensor in self._model.state_dict().items():
            owner, inside, rest = name.rpartition(".base_layer.")
            if inside:
                if rest == "weight":
                    tensor = (tensor + self._layers[owner].get_delta_weight(_NAME)).to(tensor.dtype)
                yield f"{owner}.{rest}", tensor
            elif not any(part.startswith("lora_") for part in name.split(".")):
                yield name, tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter's own weights under their names in PEFT's format, as they are held: perhaps sharded."""
        import peft

        state = peft.get_peft_model_state_dict(self._peft, adapter_name=_NAME, save_embedding_layers=False)
        yield from state.items()

    def save(self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

        Args:
            folder: Made where there is none.
            weights: `tensors`, whole, where they are sharded; None: they are not.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = copy.copy(self._peft.peft_config[_NAME])
        config.inference_mode = True
        config.save_pretrained(str(folder))
        state = dict(self.tensors()) if weights is None else weights
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Copy the weights of a saved adapter into this one. Raises `UserError` when they do not fit."""
        import peft
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            saved = load_file(folder / _WEIGHTS)
            own = peft.get_peft_model_state_dict(self._peft, adapter_name=_NAME, save_embedding_layers=False)
            if odd := set(saved) ^ set(own):
                raise UserError(f"adapter {folder}: it has other layers than the model's adapter: {min(odd)}")
            with torch.no_grad():
                for name, tensor in own.items():
                    if tensor.shape != saved[name].shape:
                        ours, theirs = list(tensor.shape), list(saved[name].shape)
                        raise UserError(f"adapter {folder}: {name} is {theirs}, and {ours} in the model's adapter")
                    tensor.copy_(saved[name])
        except (OSError, SafetensorError) as error:
            raise UserError(f"adapter {folder}: it cannot be read: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]
