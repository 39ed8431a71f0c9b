"""Log-probabilities of given tokens from hidden states, without ever holding logits of [tokens, vocabulary].

Logits are computed by chunks of tokens, reduced to a few numbers per token and dropped. What a gradient needs of them
is, for each token, the difference between the model's distribution and the token itself. It is kept where all tokens
fit in one chunk; with a frozen head it is multiplied by the head on the spot; else it is computed again on the way
back. On a Hopper GPU (H100, H200) Liger-Kernel's fused kernel takes over where it is installed (extra `liger`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stepgym.model.liger import liger_fits, liger_scores, one_temperature
from stepgym.model.output_head import PLAIN, HeadForm

CHUNK_LOGITS = 2**23
"""Most logits that are held at a time (32 MiB in float32); on CUDA a percent of the device's memory, if more."""
_FEW_LOGITS = 2**20
"""So few logits (4 MiB in float32) are left to torch's own loss, which is faster for them."""
_HALF = (torch.bfloat16, torch.float16)


class TokenScores(NamedTuple):
    """What a model says about tokens that were sampled. All tensors are [K], float32 (float64 for a float64 model).

    Attributes:
        logprob: log-softmax(logits / temperature) of the token; carries the gradient.
        entropy: Entropy of softmax(logits / temperature) in nats, without gradient; None where not asked for.
        greedy: bool, whether the token is the most likely one; None where not asked for.
    """

    logprob: Tensor
    entropy: Tensor | None = None
    greedy: Tensor | None = None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    form: HeadForm = PLAIN,
    temperature: Tensor | None = None,
    entropy: bool = False,
    greedy: bool = False,
    chunk_logits: int | None = None,
) -> TokenScores:
    """Score tokens from the hidden states that predict them.

    At most `chunk_logits` logits exist at a time. Which chunks are taken changes no result. Under autocast matrix
    products are computed in its type and everything else in float32; the gradient of the weight is summed in float32.

    Args:
        hidden: [K, H], the last hidden state before each token.
        weight: [V, H], the output embedding.
        targets: int64 [K], the tokens.
        bias: [V], or None.
        form: What becomes of the projection; see `find_head_form`.
        temperature: [K], above 0, or None for 1.
        entropy: Whether to return entropies too.
        greedy: Whether to return whether each token is the most likely one.
        chunk_logits: Most logits that are held at a time; None: `CHUNK_LOGITS`, more on a large GPU.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if form == PLAIN and bias is None and not greedy and liger_fits(hidden, dtype):
        heat = one_temperature(temperature)
        if heat is not None:
            return TokenScores(*liger_scores(hidden.to(dtype), weight.to(dtype), targets, heat, entropy))
    rows = max(1, (chunk_logits or _chunk_logits(hidden.device)) // weight.shape[0])
    if form == PLAIN and len(hidden) <= min(rows, _FEW_LOGITS // weight.shape[0]):
        return scores_from_logits(functional.linear(hidden, weight, bias), targets, temperature, entropy, greedy)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    how = _How(form, entropy, greedy, rows, dtype, learns)
    with torch.autocast(device, enabled=False):
        return TokenScores(*_Scores.apply(hidden, weight, bias, targets, temperature, how))  # type: ignore[no-untyped-call]


def scores_from_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None = None,
    entropy: bool = False,
    greedy: bool = False,
) -> TokenScores:
    """Score tokens ([K]) from the logits that predict them ([K, V]). Half-precision logits are widened first."""
    if logits.dtype in _HALF:
        logits = logits.float()
    if temperature is not None:
        logits = logits / temperature.to(logits.dtype)[:, None]
    logprob = -functional.cross_entropy(logits, targets, reduction="none")
    entropies = hits = None
    with torch.no_grad():
        if entropy:
            entropies = torch.special.entr(torch.softmax(logits, dim=-1)).sum(-1)
        if greedy:
            hits = logits.argmax(-1) == targets
    return TokenScores(logprob, entropies, hits)


class _How(NamedTuple):
    """What to compute, and how: `rows` tokens at a time, matrix products in `dtype`."""

    form: HeadForm
    entropy: bool
    greedy: bool
    rows: int
    dtype: torch.dtype
    learns: bool


class _Scores(torch.autograd.Function):
    """Scores of tokens; the gradient is that of the log-probabilities.

    With p the distribution, t the token, T its temperature and s the slope of the soft cap at each logit:
    d logprob / d projection = (1[t] - p) * s * scale / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        how: _How,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        needed = [flag and how.learns for flag in ctx.needs_input_grad[:3]]
        frozen = needed[0] and not needed[1] and not needed[2]
        kept = any(needed) and not frozen and len(hidden) <= how.rows
        head = _Head(weight, bias, how)
        scores: list[TokenScores] = []
        saved: list[Tensor] = []
        for piece in _pieces(len(hidden), how.rows):
            heat = None if temperature is None else temperature[piece]
            logits = head.logits(hidden[piece])
            scores.append(head.scores(logits, targets[piece], heat))
            if frozen or kept:
                off = head.off(logits, targets[piece], heat, scores[-1].logprob)
                saved.append(off if kept else _product(off, head.weight))
        logprob, entropy, greedy = (
            None if parts[0] is None else torch.cat(parts) for parts in zip(*scores, strict=True)
        )
        assert logprob is not None
        ctx.mark_non_differentiable(*(tensor for tensor in (entropy, greedy) if tensor is not None))
        ctx.set_materialize_grads(False)
        ctx.how, ctx.dtypes = how, (hidden.dtype, weight.dtype)
        if any(needed):
            inputs = (None, None, None) if frozen else (hidden, weight, bias)
            ctx.save_for_backward(*inputs, targets, temperature, logprob, torch.cat(saved) if saved else None)
        return logprob, entropy, greedy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        hidden, weight, bias, targets, temperature, logprob, saved = ctx.saved_tensors
        how: _How = ctx.how
        with torch.autocast(grad.device.type, enabled=False):
            # Rows of the vocabulary's width are never multiplied by what a token's row is multiplied by.
            factor = -how.form.scale * (grad if temperature is None else grad / temperature)[:, None]
            if hidden is None:
                return ((saved * factor).to(ctx.dtypes[0]), None, None, None, None, None)
            head = _Head(weight, bias, how)
            to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
            to_weight = torch.zeros_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
            to_bias = torch.zeros_like(weight[:, 0], dtype=grad.dtype) if ctx.needs_input_grad[2] else None
            for piece in _pieces(len(hidden), how.rows):
                off = saved
                if off is None:
                    heat = None if temperature is None else temperature[piece]
                    off = head.off(head.logits(hidden[piece]), targets[piece], heat, logprob[piece])
                if to_hidden is not None:
                    to_hidden[piece] = _product(off, head.weight) * factor[piece]
                if to_weight is not None:
                    _add_product(to_weight, off.t(), (hidden[piece] * factor[piece]).to(how.dtype), how.rows)
                if to_bias is not None:
                    to_bias += torch.mv(off.t().to(grad.dtype), factor[piece, 0])
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *(None, None, None),
        )


class _Head:
    """An output head at work on one chunk of tokens after another, in two buffers [rows, V].

    Attributes:
        weight: [V, H] in the type that products are computed in.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, how: _How) -> None:
        self.weight = weight.to(how.dtype)
        self._bias = bias
        self._how = how
        # Fresh memory costs the CPU about as much as what is computed in it; CUDA's is at hand, and passes are fused.
        self._fused = weight.is_cuda
        self._buffers = None if self._fused or how.dtype in _HALF else weight.new_empty(2, 0, len(weight))

    def logits(self, hidden: Tensor) -> Tensor:
        """[C, V], float32 or wider; overwritten by the next call."""
        projection = _product(hidden.to(self.weight.dtype), self.weight.t(), out=self._buffer(0, len(hidden)))
        if self._bias is not None:
            projection += self._bias
        return self._how.form.logits(projection)

    def scores(self, logits: Tensor, targets: Tensor, temperature: Tensor | None) -> TokenScores:
        """What is asked for of each token."""
        chosen = logits.gather(1, targets[:, None])
        top, total, mean = self._call(_reduced, logits, _column(temperature), self._how.entropy)
        heat = 1.0 if temperature is None else temperature.to(logits.dtype)
        logprob = (chosen - top).squeeze(1) / heat - total
        entropy = None if mean is None else (total - mean / heat).clamp_(min=0)
        return TokenScores(logprob, entropy, (chosen == top).squeeze(1) if self._how.greedy else None)

    def off(self, logits: Tensor, targets: Tensor, temperature: Tensor | None, logprob: Tensor) -> Tensor:
        """(p - 1[t]) * s, [C, V], in the type that products are computed in; overwritten by the next call."""
        cap = self._how.form.cap
        chosen = logits.gather(1, targets[:, None])
        heat = _column(temperature)
        # What logits minus it, divided by the temperature, are log-probabilities.
        zero = chosen - (logprob[:, None] if heat is None else logprob[:, None] * heat)
        off: Tensor = self._call(_weighed, logits, zero, heat, cap, self._how.dtype)
        at_target = torch.expm1(logprob)[:, None]
        if cap is not None:
            at_target = at_target * (1 - (chosen / cap).square())
        return off.scatter_(1, targets[:, None], at_target.to(off.dtype))

    def _buffer(self, index: int, rows: int) -> Tensor | None:
        if self._buffers is None:
            return None
        if self._buffers.shape[1] < rows:
            self._buffers = self._buffers.new_empty(2, rows, len(self.weight))
        return self._buffers[index, :rows]

    def _call(self, function: Callable[..., Any], logits: Tensor, *inputs: Any) -> Any:
        if self._fused and not torch.compiler.is_compiling():
            function = _compiled(function)
        return function(logits, *inputs, out=self._buffer(1, len(logits)))


def _reduced(
    logits: Tensor, temperature: Tensor | None, entropy: bool, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row: its largest logit [C, 1]; relative to that, log-sum-exp at the temperature, and mean logit [C]."""
    top = logits.amax(-1, keepdim=True)
    weights = torch.sub(logits, top, out=out)
    if temperature is not None:
        weights = torch.div(weights, temperature, out=out)
    weights = torch.exp(weights, out=out)
    total = weights.sum(-1)
    mean = torch.mul(weights, logits, out=out).sum(-1) / total - top.squeeze(1) if entropy else None
    return top, total.log(), mean


def _weighed(
    logits: Tensor,
    zero: Tensor,
    temperature: Tensor | None,
    cap: float | None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """p * s."""
    weights = torch.sub(logits, zero, out=out)
    if temperature is not None:
        weights = torch.div(weights, temperature, out=out)
    weights = torch.exp(weights, out=out)
    if cap is not None:
        weights = torch.mul(weights, 1 - (logits / cap).square(), out=out)
    return weights.to(dtype)


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """A matrix product, in float32 or wider."""
    if left.dtype not in _HALF:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def _add_product(total: Tensor, left: Tensor, right: Tensor, rows: int) -> None:
    """total [V, H] += left [V, C] @ right [C, H]; takes no more room than `rows` rows of logits."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    for part in _pieces(len(total), max(1, rows * len(total) // right.shape[1])):
        total[part] += _product(left[part], right)


def _pieces(count: int, size: int) -> list[slice]:
    """Slices of at most `size`; one, empty, where there is nothing."""
    return [slice(start, min(start + size, count)) for start in range(0, max(1, count), size)]


def _column(temperature: Tensor | None) -> Tensor | None:
    return None if temperature is None else temperature[:, None]


def _chunk_logits(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_LOGITS
    return max(CHUNK_LOGITS, torch.cuda.get_device_properties(device).total_memory // 400)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
