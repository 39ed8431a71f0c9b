"""Forward passes over slots: which logits follow the tokens that are new.

`SlotForward` computes all requests in one pass, with attention of our own over slots. It is checked against the plain
model before it is used; a model that it does not fit (recurrent layers, attention sinks, ...) gets `SeparateForward`,
which runs every request by itself with the cache that `transformers` made for that model.
"""

from __future__ import annotations

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepgym.errors import UserError
from stepgym.model.engines.slots import ATTENTION_NAME, Segment, SlotBatch, SlotCache, register_attention

logger = logging.getLogger(__name__)
Decoding = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


class Forward(ABC):
    """A model as slots see it.

    The modules that run are a copy whose parameters are those of the given model, the same tensors: an update of the
    model's weights is seen at once, while attention and training mode can be set without touching the model.

    Attributes:
        copies: Whether a prefix of one slot can be copied to another and a slot be cut back.
    """

    copies: ClassVar[bool]
    attention: ClassVar[str | None] = None

    def __init__(self, model: Any) -> None:
        self._model = model
        self._view: Any = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the model's parameters where they are not those any more that were copied from."""
        ours = () if self._view is None else self._view.parameters()
        if [id(p) for p in ours] != [id(p) for p in self._model.parameters()]:
            self._view = _shared_copy(self._model)
            if self.attention is not None:
                self._view.set_attn_implementation(self.attention)

    @abstractmethod
    def grow(self, capacity: int, filled: Sequence[int]) -> None:
        """Make room for `capacity` tokens in every slot; `filled` says how many there are in each."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""

    @abstractmethod
    def __call__(self, decoding: Decoding, segments: Sequence[Segment], finishing: Sequence[int]) -> Tensor:
        """Compute new tokens.

        Args:
            decoding: `(slots, positions, ids)` of slots with one new token each, slots ascending; int64 [n] each.
            segments: Slots with several new tokens.
            finishing: Indices into `segments` of those whose last token's logits are wanted.

        Returns:
            float32 [n + len(finishing), vocabulary].
        """


class SlotForward(Forward):
    """All requests in one pass, with attention over slots."""

    copies = True
    attention = ATTENTION_NAME

    def __init__(self, model: Any, slots: int) -> None:
        register_attention()
        super().__init__(model)
        self._keeps = _takes(model, "logits_to_keep")
        self._cache = SlotCache(slots, model.device)
        self.device: torch.device = model.device

    def grow(self, capacity: int, filled: Sequence[int]) -> None:
        """Make room for `capacity` tokens in every slot; see `Forward`."""
        self._cache.grow(capacity, filled)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        self._cache.copy(source, target, length)

    def __call__(self, decoding: Decoding, segments: Sequence[Segment], finishing: Sequence[int]) -> Tensor:
        """Compute new tokens; see `Forward`."""
        slots, positions, ids = decoding
        batch = SlotBatch(self._cache, (slots, positions), segments)
        flat = np.concatenate([ids, *(s.ids for s in segments)]).astype(np.int64)
        ends = len(slots) + np.cumsum([len(s.ids) for s in segments], dtype=np.int64) - 1
        wanted = np.concatenate([np.arange(len(slots)), ends[list(finishing)]]).astype(np.int64)
        keep = torch.from_numpy(wanted).to(self.device)
        everything = len(wanted) == len(flat)
        options = {"logits_to_keep": keep} if self._keeps and not everything else {}
        output = self._view(
            input_ids=torch.from_numpy(flat).to(self.device)[None],
            position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
            use_cache=False,
            slot_batch=batch,
            **options,
        )
        logits: Tensor = output.logits[0]
        return (logits if options or everything else logits[keep]).float()


class SeparateForward(Forward):
    """Every request by itself, with the model's own kind of cache. Right for any model, and slow."""

    copies = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._device: torch.device = model.device
        self._caches: dict[int, Any] = {}

    def grow(self, capacity: int, filled: Sequence[int]) -> None:
        """Nothing to do: these caches grow by themselves."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Not possible in general. Raises `NotImplementedError`."""
        raise NotImplementedError("the caches of this model cannot be copied")

    def __call__(self, decoding: Decoding, segments: Sequence[Segment], finishing: Sequence[int]) -> Tensor:
        """Compute new tokens; see `Forward`."""
        single = [Segment(int(s), int(p), np.array([i], dtype=np.int32)) for s, p, i in zip(*decoding, strict=True)]
        wanted = {len(single) + index for index in finishing} | set(range(len(single)))
        rows = []
        for index, segment in enumerate([*single, *segments]):
            positions = torch.arange(segment.start, segment.start + len(segment.ids), device=self._device)
            output = self._view(
                input_ids=torch.from_numpy(segment.ids.astype(np.int64)).to(self._device)[None],
                position_ids=positions[None],
                past_key_values=self._caches.get(segment.slot) if segment.start else None,
                use_cache=True,
            )
            self._caches[segment.slot] = output.past_key_values
            if index in wanted:
                rows.append(output.logits[0, -1])
        if not rows:
            return torch.empty(0, 1)
        return torch.stack(rows).float()


def choose_forward(model: Any, slots: int) -> Forward:
    """The fastest way to run `model` that computes what the model computes."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    reason = ""
    if not kinds <= {"full_attention", "sliding_attention"}:
        reason = f"it has layers of the kind {', '.join(sorted(kinds))}"
    else:
        try:
            gap = _largest_gap(model)
            if not gap < (1e-3 if model.dtype == torch.float32 else 0.1):
                reason = f"its logits would differ by {gap:.1e} of their range"
        except Exception as error:  # whatever a foreign architecture does not like about it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if not reason:
        return SlotForward(model, slots)
    logger.warning("%s cannot run many requests in one pass, so each runs by itself: %s", type(model).__name__, reason)
    return SeparateForward(model)


@torch.inference_mode()
def _largest_gap(model: Any) -> float:
    """How far the logits of `SlotForward` are from the model's own, as a share of their range, on a few tokens."""
    trial = SlotForward(model, slots=3)
    plain = _shared_copy(model)
    rng = np.random.default_rng(0)
    size = model.get_input_embeddings().num_embeddings
    ids = [rng.integers(0, size, 9).astype(np.int32) for _ in range(2)]
    expected = torch.cat(
        [plain(torch.from_numpy(row.astype(np.int64)).to(model.device)[None], use_cache=False).logits[0] for row in ids]
    ).float()
    nothing = np.zeros(0, dtype=np.int64)
    trial((nothing, nothing, nothing), [Segment(0, 0, ids[0][:4]), Segment(2, 0, ids[1][:2])], [])
    first = trial((nothing, nothing, nothing), [Segment(0, 4, ids[0][4:8]), Segment(2, 2, ids[1][2:8])], [0, 1])
    second = trial((np.array([0, 2]), np.array([8, 8]), np.array([ids[0][8], ids[1][8]], dtype=np.int64)), [], [])
    gap = (torch.cat([first, second]) - expected[[7, 16, 8, 17]]).abs().max()
    return float(gap / (expected.max() - expected.min()).clamp_min(1e-30))


def _shared_copy(model: Any) -> Any:
    """A copy of the modules, in evaluation mode, on the very parameters and buffers of `model`."""
    tensors = [*model.parameters(), *model.buffers()]
    view = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    if getattr(view, "is_gradient_checkpointing", False):
        view.gradient_checkpointing_disable()
    return view


def _takes(model: Any, parameter: str) -> bool:
    """Whether the model's forward has a parameter of that name (under an adapter: whether the wrapped model's has)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return parameter in inspect.signature(base.forward).parameters


def context_length_of(model: Any, *, given: int | None = None) -> int:
    """Most tokens that the model was made for; `given` where its config does not say.

    Raises `UserError` where neither says.
    """
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    if given is None:
        raise UserError(f"the config of {type(model).__name__} names no context length: set context_length")
    return given
