"""The model that is trained: log-probabilities of given tokens, with gradients, for any causal language model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from stepgym.errors import UserError
from stepgym.model.logprobs import TokenScores, has_plain_head, scores_from_logits, token_scores
from stepgym.model.progress_bars import quiet_transformers
from stepgym.train.batch import Batch, MicroBatch, micro_batches
from stepgym.train.lora import Adapter, LoRAConfig

logger = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class PolicyConfig(BaseModel):
    """How the model is held and computed.

    Attributes:
        device: A torch device such as `cpu` or `cuda:0`; `auto` is `cuda` where there is one.
        dtype: Type of the weights. Keep float32 and let `autocast` compute in bfloat16: an optimizer step at a small
            learning rate is lost in bfloat16 weights.
        autocast: `bfloat16` computes matrix products in bfloat16, `none` in the type of the weights; `auto` is
            `bfloat16` on CUDA and `none` on the CPU.
        attention: Attention implementation of `transformers`.
        gradient_checkpointing: Keep only each layer's input and compute the rest again on the way back: less memory,
            about a third more time.
        micro_batch_tokens: Most tokens, padding included, of one forward and backward pass. Changes memory and speed,
            never the result.
        lora: Train a low-rank adapter (`stepgym.train.lora.LoRAConfig`) and leave the model's own weights as they are;
            null trains all weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    autocast: Literal["auto", "none", "bfloat16"] = "auto"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    gradient_checkpointing: bool = False
    micro_batch_tokens: int = Field(default=16384, gt=0)
    lora: LoRAConfig | None = None


class Policy:
    """A causal language model of `transformers`, as the trainer sees it.

    The model may be shared with an engine in the same process, which then samples from the current weights. It is in
    evaluation mode except within an update, and dropout is switched off for good: what is trained must be what was
    sampled from. (An adapter's own dropout is on within an update, where gradients are taken.)

    Args:
        model: A `transformers` model with a language-modelling head.
        config: How it is held and computed.
        seed: Seeds a new adapter.

    Attributes:
        model: The model, adapter included.
        adapter: What is trained where the config asks for LoRA; else None, and all of the model is trained.
    """

    def __init__(self, model: Any, config: PolicyConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or PolicyConfig()
        self.device = _device(self.config.device)
        self.model = model.to(device=self.device, dtype=_DTYPES[self.config.dtype])
        self.model.requires_grad_(True)
        _disable_dropout(self.model)
        self.adapter = None if self.config.lora is None else Adapter(self.model, self.config.lora, seed=seed)
        self._without_adapter = False
        self.model.eval()
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._plain_head = has_plain_head(self.model)
        if not self._plain_head:
            logger.info("the head of %s does more than one projection: logits are computed whole", type(model).__name__)

    @classmethod
    def load(cls, path: str | Path, config: PolicyConfig | None = None) -> Policy:
        """Load a model from a folder or a hub name. Raises `UserError` when there is none."""
        from transformers import AutoModelForCausalLM

        config = config or PolicyConfig()
        try:
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(
                    str(path), dtype=_DTYPES[config.dtype], attn_implementation=config.attention
                )
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"model {str(path)!r} cannot be loaded: {reason}") from error
        return cls(model, config)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that matrix products are computed in."""
        return torch.bfloat16 if self._autocasts else _DTYPES[self.config.dtype]

    @property
    def noisy(self) -> bool:
        """Whether a forward pass within an update is not that of the rollouts: an adapter's dropout is on."""
        return self.adapter is not None and self.adapter.config.dropout > 0

    def frozen_copy(self) -> Policy:
        """What is never trained, the reference of a KL term: a copy.

        With an adapter it is the model without the adapter, and nothing is copied; what a warm start taught the
        adapter is no part of it.
        """
        twin = copy.copy(self)
        if self.adapter is not None:
            twin._without_adapter = True
            return twin
        twin.model = copy.deepcopy(self.model)
        twin.model.requires_grad_(False)
        return twin

    @contextmanager
    def training(self) -> Iterator[None]:
        """Training mode within, evaluation mode after. Gradient checkpointing and an adapter's dropout need it."""
        self.model.train(self.config.gradient_checkpointing or self.noisy)
        try:
            yield
        finally:
            self.model.eval()

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Cut a batch to `micro_batch_tokens`."""
        return list(micro_batches(batch, self.config.micro_batch_tokens))

    def score(self, micro_batch: MicroBatch, *, entropy: bool = False, greedy: bool = False) -> TokenScores:
        """Score the trained tokens of a micro-batch, in its order; see `token_scores`.

        Logits are computed only where a trained token is predicted. Everything is returned on the policy's device.
        """
        ids = micro_batch.ids.to(self.device, non_blocking=True)
        place = micro_batch.place.to(self.device, non_blocking=True)
        target = micro_batch.target.to(self.device, non_blocking=True)
        temperature = micro_batch.temperature
        if temperature is not None:
            temperature = temperature.to(self.device, non_blocking=True)
        with self._computing():
            if not self._plain_head:
                logits = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1).index_select(0, place)
                return scores_from_logits(logits, target, temperature, entropy, greedy)
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            head = self.model.get_output_embeddings()
            return token_scores(
                hidden.flatten(0, 1).index_select(0, place),
                head.weight,
                target,
                bias=head.bias,
                temperature=temperature,
                entropy=entropy,
                greedy=greedy,
            )

    @torch.no_grad()
    def logprobs(self, micro_batches: list[MicroBatch], count: int) -> torch.Tensor:
        """Tensor [count] on the policy's device: the log-probability of each trained token of a batch, no gradient."""
        result: torch.Tensor | None = None
        training = self.model.training
        self.model.train(training and not self.noisy)
        for micro_batch in micro_batches:
            scores = self.score(micro_batch)
            if result is None:
                result = torch.zeros(count, dtype=scores.logprob.dtype, device=self.device)
            result[micro_batch.token.to(self.device)] = scores.logprob
        self.model.train(training)
        return torch.zeros(count, device=self.device) if result is None else result

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None, max_shard_size: int | str = "50GB") -> None:
        """Write the model as a folder that `transformers` and servers load; an adapter is merged into its weights.

        Args:
            folder: Made where there is none.
            dtype: Type of the weights on disk; None: their own.
            max_shard_size: Bytes of one file at most.
        """
        state: dict[str, torch.Tensor] | None = None
        if self.adapter is not None or dtype not in (None, self.model.dtype):
            tensors = self.model.state_dict().items() if self.adapter is None else self.adapter.merged()
            state = _on_cpu(tensors, dtype, {tensor.data_ptr() for tensor in self.model.state_dict().values()})
        with quiet_transformers():
            self.model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)

    def load_weights(self, folder: Path) -> None:
        """Copy the weights of a saved model into this one, in place. Raises `UserError` when they do not fit."""
        from transformers import AutoModelForCausalLM

        try:
            # Through from_pretrained, because the names on disk are not those in memory for every architecture.
            with quiet_transformers():
                saved = AutoModelForCausalLM.from_pretrained(str(folder), dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"checkpoint {folder}: its weights do not fit the model: {reason}") from error

    @torch.no_grad()
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under the names of a Hugging Face model folder, tied ones once; an adapter is merged."""
        from transformers.core_model_loading import revert_weight_conversion

        tensors = self.model.state_dict().items() if self.adapter is None else self.adapter.merged()
        once: dict[tuple[int, torch.Size], str] = {}
        state = {
            name: tensor for name, tensor in tensors if once.setdefault((tensor.data_ptr(), tensor.shape), name) == name
        }
        yield from revert_weight_conversion(self.model, state).items()

    @property
    def _autocasts(self) -> bool:
        wanted = self.config.autocast
        if wanted == "auto":
            return self.device.type == "cuda" and self.config.dtype == "float32"
        return wanted == "bfloat16"

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Autocast, and without the adapter where that is what this policy is."""
        with ExitStack() as stack:
            if self._autocasts:
                stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
            if self._without_adapter and self.adapter is not None:
                stack.enter_context(self.adapter.off())
            yield


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is not one; use cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r}: this machine has no CUDA GPU, or torch was built without CUDA; use cpu")
    return device


def _disable_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _on_cpu(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, own: set[int]
) -> dict[str, torch.Tensor]:
    """The tensors in main memory, floats in `dtype`. Those that share their storage still do.

    `own` are the addresses of the model's own tensors. Only they may be shared: a tensor that was made on the way is
    gone when the next one is made, perhaps at the same address.
    """
    moved: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, tensor in tensors:
        key = (tensor.data_ptr(), tensor.shape)
        if key in moved:
            state[name] = moved[key]
            continue
        state[name] = tensor.detach().to(device="cpu", dtype=dtype if tensor.is_floating_point() else None)
        if key[0] in own:
            moved[key] = state[name]
    return state
