"""Sums over trained tokens, kept on the device until a batch is done."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stepgym.train.parallel.processes import Processes


class TokenMetrics:
    """Adds up metrics of trained tokens over the micro-batches and updates of a batch.

    Sums stay on the device, in float64, so that measuring does not wait for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._tokens = 0
        self._gap_tokens: torch.Tensor | None = None
        self._updates = 0

    def count(self, tokens: int) -> None:
        """Say over how many tokens the metrics added so far were taken."""
        self._tokens += tokens

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add tensors [K] by name; their mean over all tokens is reported. Of `ratio` also the maximum."""
        for name, value in values.items():
            value = value.detach()
            self._add(name, value.double().sum())
            if name == "ratio" and value.numel():
                self._raise("ratio_max", value.max())

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, which is already weighted."""
        self._add("loss", loss.double())

    def add_gap(self, trainer: torch.Tensor, sampler: torch.Tensor) -> None:
        """Add |trainer - sampler| of the tokens ([K]) where the sampler's log-probability is not NaN."""
        known = ~sampler.isnan()
        gap = torch.where(known, (trainer - sampler).abs(), 0.0)
        self._add("logprob_gap_mean", gap.double().sum())
        self._gap_tokens = known.sum() if self._gap_tokens is None else self._gap_tokens + known.sum()
        if gap.numel():
            self._raise("logprob_gap_max", gap.max())

    def close(self) -> None:
        """Say that an update's gradient is complete."""
        self._updates += 1

    def merge(self, other: TokenMetrics) -> None:
        """Add the sums of another update."""
        for name, total in other._sums.items():
            self._add(name, total)
        for name, highest in other._maxima.items():
            self._raise(name, highest)
        self._tokens += other._tokens
        self._updates += other._updates
        if other._gap_tokens is not None:
            mine = self._gap_tokens
            self._gap_tokens = other._gap_tokens if mine is None else mine + other._gap_tokens

    def means(self, processes: Processes | None = None) -> dict[str, float]:
        """The metrics by name: means over tokens, the loss as a mean over updates, maxima as they are.

        With several processes: over what all ranks have added. All of them call it.
        """
        if processes is not None and processes.size > 1:
            return self._over(processes).means()
        result: dict[str, float] = {}
        gap_tokens = 0 if self._gap_tokens is None else int(self._gap_tokens)
        for name, total in self._sums.items():
            if name == "logprob_gap_mean":
                if gap_tokens:
                    result[name] = float(total) / gap_tokens
            elif name == "loss":
                result[name] = float(total) / max(1, self._updates)
            else:
                result[name] = float(total) / max(1, self._tokens)
        for name, highest in self._maxima.items():
            if name != "logprob_gap_max" or gap_tokens:
                result[name] = float(highest)
        return result

    def _over(self, processes: Processes) -> TokenMetrics:
        """The sums and maxima over all ranks. A rank that had no token of its own knows no names."""
        parts = processes.gather((list(self._sums), list(self._maxima), self._gap_tokens is not None))
        sums = sorted({name for names, _, _ in parts for name in names})
        maxima = sorted({name for _, names, _ in parts for name in names})
        zero = torch.zeros((), dtype=torch.float64, device=processes.device)
        gaps = zero if self._gap_tokens is None else self._gap_tokens.double()
        mine = [zero + self._tokens, gaps, *(self._sums.get(name, zero).double() for name in sums)]
        totals = processes.sum(torch.stack(mine))
        result = TokenMetrics()
        result._tokens, result._updates = int(totals[0]), self._updates
        result._gap_tokens = totals[1] if any(known for _, _, known in parts) else None
        result._sums = dict(zip(sums, totals[2:], strict=True))
        if maxima:
            highest = processes.max(torch.stack([self._maxima.get(name, zero - torch.inf).double() for name in maxima]))
            result._maxima = dict(zip(maxima, highest, strict=True))
        return result

    def _add(self, name: str, total: torch.Tensor) -> None:
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def _raise(self, name: str, value: torch.Tensor) -> None:
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
