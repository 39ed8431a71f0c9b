"""The model and its head as one module: tokens in, scores of trained tokens out."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepgym.errors import UserError
from stepgym.model.logprobs import TokenScores, scores_from_logits, token_scores
from stepgym.model.output_head import find_head_form
from stepgym.train.packs.micro_batch import MicroBatch, Tree

logger = logging.getLogger(__name__)

_SMALL_GAP = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative difference of hidden states that counts as rounding, by type of the weights."""

# What a model is tried on: a stem of 6 tokens with branches of 5 and 4, and another tree of 5.
_STEM, _LEFT, _RIGHT, _OTHER = ([n * k for n in range(size)] for size, k in ((6, 3), (5, 7), (4, 11), (5, 13)))
_FOREST = _STEM + _LEFT + _RIGHT + _OTHER
_ENDS = [15] * 6 + [11] * 5 + [15] * 4 + [20] * 5
_PATHS = [_STEM + _LEFT, _STEM + _RIGHT, _OTHER]
_NODES = [[*range(11)], [*range(6), *range(11, 15)], [*range(15, 20)]]
_BRANCHES = [range(6, 11), range(11, 15)]


class ForwardModule(torch.nn.Module):
    """Backbone, the rows that predict, head and log-probabilities, all within one `forward`.

    One module, because what is sharded (FSDP) gathers its weights when its own `forward` is called; the head's weights
    are used here, beside the model's `forward`.

    Args:
        model: A causal language model of `transformers`.
        attention: The kernel for forests: `stepgym.train.attention.segments` or `.flex`.

    Attributes:
        model: The model.
        branches: Whether the model computes forests; found by trying. If not, it is given padded rows, and
            `branches_not` says why.
    """

    def __init__(self, model: Any, attention: ModuleType) -> None:
        super().__init__()
        self.model = model
        self._attention = attention
        self._head_form = find_head_form(model)
        if self._head_form is None:
            logger.info("the head of %s is none that is known: logits are computed whole", type(model).__name__)
        self.branches_not = self._try_forest()

    @property
    def branches(self) -> bool:
        """Whether the model computes forests."""
        return not self.branches_not

    @property
    def attention_name(self) -> str:
        """Name of the kernel for forests: `segments` or `flex`."""
        return self._attention.__name__.rpartition(".")[2]

    def forward(self, micro_batch: MicroBatch, entropy: bool = False, greedy: bool = False) -> TokenScores:
        """Score the trained tokens of a micro-batch, in its order.

        Logits exist only where a trained token is predicted, and only some at a time (see `token_scores`).

        Args:
            micro_batch: What to compute; its tensors may lie on another device.
            entropy, greedy: What to compute besides.

        Returns:
            Tensors [M] on the model's device.
        """
        device = self.model.device
        place, target, which, temperature = (
            None if tensor is None else tensor.to(device, non_blocking=True)
            for tensor in (micro_batch.place, micro_batch.target, micro_batch.which, micro_batch.temperature)
        )
        assert place is not None
        assert target is not None
        if self._head_form is not None:
            head = self.model.get_output_embeddings()
            hidden = self._run(self.model.base_model, micro_batch).last_hidden_state.flatten(0, 1)
            scores = token_scores(
                hidden.index_select(0, place),
                head.weight,
                target,
                bias=head.bias,
                form=self._head_form,
                temperature=temperature,
                entropy=entropy,
                greedy=greedy,
            )
        else:
            logits = self._run(self.model, micro_batch).logits.flatten(0, 1).index_select(0, place)
            scores = scores_from_logits(logits, target, temperature, entropy, greedy)
        if which is None:
            return scores
        return TokenScores(*(None if tensor is None else tensor.index_select(0, which) for tensor in scores))  # type: ignore[arg-type]

    def _run(self, module: Any, micro_batch: MicroBatch, plan: Any = None) -> Any:
        device = self.model.device
        ids, position, tree = micro_batch.ids, micro_batch.position, micro_batch.tree
        if tree is None:
            return module(input_ids=ids.to(device, non_blocking=True), use_cache=False)
        assert position is not None
        # Compiled kernels are made for some lengths only; nothing attends to what is added behind.
        room = self._attention.bucket(ids.shape[1]) - ids.shape[1]
        if room:
            ids, position = (torch.nn.functional.pad(tensor, (0, room)) for tensor in (ids, position))
        return module(
            input_ids=ids.to(device, non_blocking=True),
            position_ids=position.to(device, non_blocking=True),
            # transformers leaves a mask of four dimensions alone; without one it would take positions that fall back
            # for rows packed end to end. The kernel does not read it.
            attention_mask=torch.zeros((1, 1, 1, 1), device=device),
            use_cache=False,
            stepgym_tree=plan or self._attention.prepare(tree, device),
        )

    def _try_forest(self) -> str:
        """Why the model cannot compute forests; empty where it can. Sets the model's attention accordingly."""
        self._attention.register()
        before = self.model.config._attn_implementation
        name = type(self.model).__name__
        try:
            plain = [self._hidden(ids) for ids in _PATHS]
            self.model.set_attn_implementation(self._attention.NAME)
            hidden, plan = self._forest(_FOREST)
            gap = max(_relative(hidden[nodes], alone) for nodes, alone in zip(_NODES, plain, strict=True))
            leaks = gap > _SMALL_GAP.get(self.model.dtype, 0.1) or self._leaks(hidden)
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # a model may fail in any way on what it was not made for
            reason = f"{name} cannot be given another attention ({type(error).__name__}: {_first_line(error)})"
        else:
            if leaks:
                reason = f"{name} does not leave the past to attention alone (recurrent or linear-attention layers)"
            elif habit := _hidden_from_kernels(self.model, plan.windows):
                reason = f"{name} {habit}"
            else:
                return ""
        self.model.set_attn_implementation(before)
        return reason

    @torch.no_grad()
    def _hidden(self, ids: list[int]) -> Tensor:
        """Hidden states of a row of its own, [L, width]."""
        size = self.model.config.get_text_config().vocab_size
        row = torch.tensor([ids], device=self.model.device) % size
        hidden: Tensor = self.model.base_model(input_ids=row, use_cache=False).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def _forest(self, ids: list[int]) -> tuple[Tensor, Any]:
        """Hidden states of the trial's forest with these ids, [N, width], and the kernel's plan."""
        size = self.model.config.get_text_config().vocab_size
        tree = Tree.of(np.array(_ENDS, dtype=np.int32))
        nothing = torch.zeros(0, dtype=torch.int64)
        position = torch.from_numpy(tree.depth)[None]
        forest = MicroBatch(torch.tensor([ids]) % size, position, tree, nothing, nothing, None, nothing)
        plan = self._attention.prepare(tree, self.model.device)
        return self._run(self.model.base_model, forest, plan).last_hidden_state[0, : len(ids)], plan

    def _leaks(self, hidden: Tensor) -> bool:
        """Whether a branch changes the hidden states of the trial's nodes that do not lie below it.

        Compared with a path alone, a little of it would pass for rounding. But what is masked adds exactly nothing, and
        equal shapes are rounded alike; only experts are then given more or fewer tokens.
        """
        limit = _SMALL_GAP.get(self.model.dtype, 0.1) / 10 if self.model._can_set_experts_implementation() else 1e-6
        for branch in _BRANCHES:
            ids = [token + 1 if node in branch else token for node, token in enumerate(_FOREST)]
            others = [node for node in range(len(ids)) if node not in branch]
            if _relative(self._forest(ids)[0][others], hidden[others]) > limit:
                return True
        return False


def _relative(one: Tensor, other: Tensor) -> float:
    """Size of the difference relative to the other; infinite where there is a NaN."""
    gap = float((one - other).norm() / other.norm().clamp_min(1e-30))
    return gap if gap == gap else float("inf")


def _hidden_from_kernels(model: Any, windows: set[int]) -> str:
    """What a model's layers do with the past that kernels for forests are not told of; empty where there is nothing.

    It shows on long paths only, so trying cannot find it.

    Args:
        model: The model.
        windows: The sliding windows that its layers told the kernel of.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    if any(type(module).__name__.endswith("Indexer") for module in model.modules()):
        return "selects what its layers attend to (sparse attention)"
    if "chunked_attention" in kinds:
        return "attends within chunks of its context"
    slides = not kinds or "sliding_attention" in kinds
    if slides and getattr(config, "sliding_window", None) and not windows:
        return "keeps its sliding window from the kernel"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def find_attention(name: str, device: torch.device) -> ModuleType:
    """The kernel for forests on a device; `auto` is `flex` on CUDA and `segments` elsewhere.

    Raises `UserError` for one that does not work there.
    """
    from stepgym.train.attention import flex, segments

    cuda = device.type == "cuda"
    if name == "auto":
        name = "flex" if cuda else "segments"
    if name == "segments" and device.type != "cpu":
        raise UserError(f"policy.attention: 'segments' is a kernel for the CPU, and the device is {device}; use flex")
    if name == "flex" and not cuda:
        raise UserError(f"policy.attention: 'flex' has no gradient on {device}; use segments")
    return flex if name == "flex" else segments


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The layers that repeat: what is sharded, and compiled, one by one. Empty where there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    backbone = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=None)
    return [] if backbone is None else list(backbone)
