"""The model that is trained: log-probabilities of given tokens, with gradients, for any causal language model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from stepgym.errors import UserError
from stepgym.model.logprobs import TokenScores
from stepgym.model.placement import place
from stepgym.model.progress_bars import quiet_transformers
from stepgym.train.compile import compile_layers
from stepgym.train.forward_module import ForwardModule, decoder_layers, find_attention
from stepgym.train.lora import Adapter
from stepgym.train.packs.batch import Batch
from stepgym.train.packs.forest import forests
from stepgym.train.packs.micro_batch import Layout, MicroBatch, idle_micro_batch
from stepgym.train.packs.rows import padded_rows
from stepgym.train.parallel.balance import Cost, deal
from stepgym.train.parallel.processes import Processes
from stepgym.train.parallel.sharding import FrozenWeights, shard
from stepgym.train.policy_config import PolicyConfig
from stepgym.train.weights import published_tensors, save_model

logger = logging.getLogger(__name__)
_SHORT, _WORTH = 512, 1.25
"""On the CPU, paths up to so long are padded where that is no more than so many times the unique tokens (measured)."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Policy:
    """A causal language model of `transformers`, as the trainer sees it.

    The model may be shared with an engine in the same process, which then samples from the current weights. It is in
    evaluation mode except within an update, and dropout is switched off for good: what is trained must be what was
    sampled from. (An adapter's own dropout is on within an update, where gradients are taken.)

    Args:
        model: A `transformers` model with a language-modelling head.
        config: How it is held and computed.
        seed: Seeds a new adapter.
        processes: Where more than one, the model is sharded over them (FSDP2), and methods that compute or move
            weights are collective.

    Attributes:
        model: The model, adapter included.
        forward_module: The model and its head as one module; see there.
        layout: What is computed once: `tree`, `merged` or `steps`.
        notes: What whoever trains should know, in lines.
        adapter: What is trained where the config asks for LoRA; else None, and all of the model is trained.
        frozen: The weights of a reference that is a copy; else None.
        processes: The ranks.
    """

    def __init__(
        self,
        model: Any,
        config: PolicyConfig | None = None,
        *,
        seed: int = 0,
        processes: Processes | None = None,
    ) -> None:
        self.config = config or PolicyConfig()
        self.processes = processes or Processes.start(self.config.device, {})
        self.device = self.processes.device
        self.model = place(model, self.device, _DTYPES[self.config.dtype])
        self.model.requires_grad_(True)
        disable_dropout(self.model)
        if self.config.dtype == "float64" and self.model._can_set_experts_implementation():
            self.model.set_experts_implementation("eager")  # torch's grouped products know no float64
        self.adapter = None if self.config.lora is None else Adapter(self.model, self.config.lora, seed=seed)
        self._without_adapter = False
        self.frozen: FrozenWeights | None = None
        self.model.eval()
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.forward_module = ForwardModule(self.model, find_attention(self.config.attention, self.device))
        self.notes: list[str] = []
        self.layout = self._choose_layout()
        if rope := _changing_rope(self.model):
            self.notes.append(
                f"its rotary positions are scaled by the longest sequence of a pass (rope_type {rope!r}): steps that "
                "share a pass with one beyond its original length are scored as that one is"
            )
        self._cost = Cost.of_model(self.model)
        self._shard()
        self._compile()

    @classmethod
    def load(cls, path: str | Path, config: PolicyConfig | None = None) -> Policy:
        """Load a model from a folder or a hub name. Raises `UserError` when there is none."""
        from transformers import AutoModelForCausalLM

        config = config or PolicyConfig()
        try:
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(str(path), dtype=_DTYPES[config.dtype])
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"model {str(path)!r} cannot be loaded: {reason}") from error
        return cls(model, config)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that matrix products are computed in."""
        return torch.bfloat16 if self._autocasts else _DTYPES[self.config.dtype]

    @property
    def compiles(self) -> bool:
        """Whether decoder layers are compiled, as far as they compute forests."""
        wanted = self.config.compile
        return self.forward_module.branches and (
            wanted == "layers" or (wanted == "auto" and self.device.type == "cuda")
        )

    @property
    def noisy(self) -> bool:
        """Whether a forward pass within an update is not that of the rollouts: an adapter's dropout is on."""
        return self.adapter is not None and self.adapter.config.dropout > 0

    def frozen_copy(self) -> Policy:
        """What is never trained, the reference of a KL term; only its `logprobs` are to be asked for.

        The weights as they are now, kept in main memory: while it computes, they and the policy's change places, so
        that no second model is ever on the device. With an adapter it is the model without the adapter, and nothing is
        kept; what a warm start taught the adapter is no part of it.
        """
        twin = copy.copy(self)
        if self.adapter is None:
            twin.frozen = FrozenWeights(self.model.parameters())
        else:
            twin._without_adapter = True
        return twin

    @contextmanager
    def training(self) -> Iterator[None]:
        """Gradient checkpointing and an adapter's dropout are on within, as far as there are any."""
        set_training(self.model, True)
        try:
            yield
        finally:
            set_training(self.model, False)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """This rank's share of a batch, cut to `micro_batch_tokens`. Every rank gets as many."""
        budget = self.config.micro_batch_tokens
        if self.processes.size == 1:
            return self._cut(batch, budget)
        shares = deal(lambda most: self._cut(batch, most), self._cost, budget, self.processes.size)
        mine = shares[self.processes.rank]
        idle = idle_micro_batch(forest=self.forward_module.branches)
        return mine + [idle] * (max(map(len, shares)) - len(mine))

    def _cut(self, batch: Batch, budget: int) -> list[MicroBatch]:
        if not self.forward_module.branches:
            return list(padded_rows(batch, self.layout, budget))
        longest = max((len(path.ids) for path in batch.paths), default=0)
        if self.config.layout == "auto" and self.device.type == "cpu" and longest <= _SHORT:
            # Short rows side by side are one call to torch's attention, a forest of them is many.
            rows = list(padded_rows(batch, "merged", budget))
            if sum(micro_batch.tokens for micro_batch in rows) <= _WORTH * batch.unique_tokens:
                return rows
        return list(forests(batch, self.layout, budget))

    def score(self, micro_batch: MicroBatch, *, entropy: bool = False, greedy: bool = False) -> TokenScores:
        """Score the trained tokens of a micro-batch, in its order; see `ForwardModule.forward`."""
        with self._computing():
            scores: TokenScores = self.forward_module(micro_batch, entropy, greedy)
        return scores

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch], count: int) -> torch.Tensor:
        """Tensor [count] on the policy's device: the log-probability of each trained token of a batch, no gradient.

        Of the whole batch, also where this rank computes only a share of it.
        """
        result: torch.Tensor | None = None
        training = self.model.training
        set_training(self.model, False)
        with nullcontext() if self.frozen is None else self.frozen.in_place():
            for micro_batch in micro_batches:
                scores = self.score(micro_batch)
                if result is None:
                    result = torch.zeros(count, dtype=scores.logprob.dtype, device=self.device)
                result[micro_batch.token.to(self.device)] = scores.logprob
        set_training(self.model, training)
        return torch.zeros(count, device=self.device) if result is None else self.processes.sum(result)

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None, max_shard_size: int | str = "50GB") -> None:
        """Write the model as a folder that `transformers` and servers load; see `save_model`. Rank 0 writes."""
        save_model(
            self.model,
            self.adapter,
            folder,
            dtype=dtype,
            max_shard_size=max_shard_size,
            write=self.processes.is_lead,
        )

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under the names of a Hugging Face model folder, whole, tied ones once; an adapter is merged."""
        return published_tensors(self.model, self.adapter)

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

    def _shard(self) -> None:
        """Spread the weights over the processes, where there are several."""
        shard(
            self.forward_module,
            decoder_layers(self.model),
            self.processes,
            compute_dtype=torch.bfloat16 if self._autocasts else None,
        )

    def _compile(self) -> None:
        if self.compiles:
            compile_layers(decoder_layers(self.model))
        elif self.config.compile == "layers":
            self.notes.append("its layers are not compiled: only forests are computed by compiled layers")

    def _choose_layout(self) -> Layout:
        wanted, module = self.config.layout, self.forward_module
        if module.branches:
            return "tree" if wanted == "auto" else wanted
        if wanted == "tree":
            raise UserError(f"policy.layout: 'tree' does not work here: {module.branches_not}; use auto or merged")
        layout: Layout = "merged" if wanted == "auto" else wanted
        self.notes.append(f"{module.branches_not}: it is trained on padded rows ({layout}), which share no prefix")
        return layout


def _changing_rope(model: Any) -> str:
    """The kind of rotary positions that depend on the length of what is computed together; empty for all others."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (parameters, *parameters.values()) if isinstance(part, dict)]
    return next((str(kind) for kind in kinds if kind == "longrope" or "dynamic" in str(kind)), "")


def disable_dropout(model: torch.nn.Module) -> None:
    """Switch all dropout of a model off for good."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and name.endswith(("dropout", "drop")):  # also resid_pdrop, layerdrop
                setattr(module, name, 0.0)


def set_training(model: torch.nn.Module, on: bool) -> None:
    """Training mode for what has to be in it, evaluation mode for all else.

    That is what keeps only its inputs (gradient checkpointing), and the dropout that an adapter has brought after
    `disable_dropout`. Other layers may add noise of their own in training mode, as the routers of some mixtures of
    experts do. `model.training` says afterwards whether it is on.
    """
    model.eval()
    if not on:
        return
    for module in model.modules():
        drops = isinstance(module, torch.nn.Dropout) and module.p > 0
        module.training = drops or bool(getattr(module, "gradient_checkpointing", False))
    model.training = True
