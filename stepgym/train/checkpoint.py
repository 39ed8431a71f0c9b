"""Checkpoints: written whole or not at all, and read back to the bit-identical next update.

A checkpoint is a folder `update-00000120/` (`update-00000120.1/` where one of that update was there before). `model/`
is in the format of `transformers` (safetensors, with the tokenizer), so that it can be served as it is. Under LoRA the
adapter is merged into it, and stands by itself in `adapter/`, in the format of PEFT. `learner.pt` holds the optimizer
and the random generators and is read with `torch.load(weights_only=True)` only; `state.json` holds the counters, the
score and what the caller keeps.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepgym.errors import UserError
from stepgym.train.learner import Learner

logger = logging.getLogger(__name__)

_NAME = re.compile(r"update-(?P<update>\d{8,})(?:\.(?P<revision>\d+))?")
_TEMPORARY = ".partial-"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: Its folder.
        update: Number of updates made when it was written.
        score: What the best one is picked by; None where it was not evaluated.
        extra: What the caller kept, as JSON.
    """

    path: Path
    update: int
    score: float | None
    extra: Mapping[str, Any]

    @property
    def model_path(self) -> Path:
        """The folder that `transformers` or a server loads."""
        return self.path / "model"

    @property
    def adapter_path(self) -> Path:
        """The folder of the adapter, in the format of PEFT; only there under LoRA."""
        return self.path / "adapter"


class CheckpointStore:
    """The checkpoints of a run.

    Args:
        path: Their folder; made when the first is written.
        keep: How many of the latest are kept. The best one, by score, is kept besides.
    """

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"checkpoints: keep must be 1 or more, not {keep}")
        self.path = Path(path)
        self.keep = keep

    def all(self) -> list[Checkpoint]:
        """All complete checkpoints, in the order of their updates."""
        if not self.path.is_dir():
            return []
        newest: dict[int, tuple[int, Path]] = {}
        for entry in self.path.iterdir():
            if match := _NAME.fullmatch(entry.name):
                update, candidate = int(match["update"]), (int(match["revision"] or 0), entry)
                newest[update] = max(newest.get(update, candidate), candidate)
        return [self._read(entry) for _, (_, entry) in sorted(newest.items())]

    def latest(self) -> Checkpoint | None:
        """The checkpoint of the latest update; None where there is none."""
        found = self.all()
        return found[-1] if found else None

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest score, the latest of equals; None where none has a score."""
        scored = [checkpoint for checkpoint in self.all() if checkpoint.score is not None]
        return max(scored, key=lambda checkpoint: (checkpoint.score, checkpoint.update)) if scored else None

    def save(
        self,
        learner: Learner,
        *,
        tokenizer: Any = None,
        score: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint of the learner as it is now, then delete those that are no longer kept.

        It is written under a temporary name, flushed to the disk and renamed, so a killed run leaves it whole or not
        at all. It takes the place of a checkpoint of the same update, which is deleted afterwards.

        Args:
            learner: What is saved: weights, optimizer, counters; and its reference, once per store.
            tokenizer: Saved beside the model where given.
            score: What the best one is picked by.
            extra: What the caller wants back on resuming, as JSON.
        """
        if score is not None and not math.isfinite(score):
            raise UserError(f"checkpoints: the score must be finite, not {score}")
        self.path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        reference = learner.reference
        # Under LoRA the reference is the model as it was loaded: nothing that would have to be kept.
        if reference is not None and reference.adapter is None and not (self.path / "reference").exists():
            self._write("reference", reference.save)
        state = {"format": _FORMAT, "update": learner.updates, "score": score, "extra": dict(extra or {})}
        text = json.dumps(state, indent=2, allow_nan=False)

        def fill(folder: Path) -> None:
            learner.policy.save(folder / "model")
            if learner.policy.adapter is not None:
                learner.policy.adapter.save(folder / "adapter")
            if tokenizer is not None:
                tokenizer.save_pretrained(folder / "model")
            torch.save({"learner": learner.state_dict(), "random": random_state()}, folder / "learner.pt")
            (folder / "state.json").write_text(text, encoding="utf-8")

        name = f"update-{learner.updates:08d}"
        present = [match for entry in self.path.iterdir() if (match := _NAME.fullmatch(entry.name))]
        taken = [int(match["revision"] or 0) for match in present if int(match["update"]) == learner.updates]
        path = self._write(f"{name}.{max(taken) + 1}" if taken else name, fill)
        self._delete_old()
        return Checkpoint(path, learner.updates, score, dict(extra or {}))

    def restore(self, learner: Learner, checkpoint: Checkpoint | None = None) -> Checkpoint | None:
        """Put a learner back where a checkpoint was written; the latest where none is given.

        Weights are copied into the learner's model, which an engine may share. Returns the checkpoint, or None
        (and changes nothing) where the store is empty.

        Raises:
            UserError: The checkpoint does not fit the model, or a file of it cannot be read.
        """
        checkpoint = checkpoint or self.latest()
        if checkpoint is None:
            return None
        try:
            state = torch.load(checkpoint.path / "learner.pt", map_location=learner.policy.device, weights_only=True)
        except Exception as error:  # torch raises errors of many types for a file that it cannot or will not read
            refused = type(error).__name__ == "UnpicklingError"
            reason = "it holds more than tensors and plain values" if refused else _first_line(error)
            raise UserError(f"checkpoint {checkpoint.path}: learner.pt cannot be read: {reason}") from error
        if learner.policy.adapter is not None:
            learner.policy.adapter.load(checkpoint.adapter_path)
        else:
            learner.policy.load_weights(checkpoint.model_path)
            if learner.reference is not None and (self.path / "reference").exists():
                learner.reference.load_weights(self.path / "reference")
        try:
            learner.load_state_dict(state["learner"])
        except (KeyError, ValueError, RuntimeError) as error:
            reason = _first_line(error)
            raise UserError(f"checkpoint {checkpoint.path}: its optimizer does not fit the model: {reason}") from error
        set_random_state(state["random"])
        return checkpoint

    # ---- within -------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> Checkpoint:
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            if state["format"] != _FORMAT:
                raise UserError(f"checkpoint {path}: its format is {state['format']}; this version reads {_FORMAT}")
            return Checkpoint(path, int(state["update"]), state["score"], state["extra"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"checkpoint {path}: state.json cannot be read: {_first_line(error)}") from error

    def _write(self, name: str, fill: Callable[[Path], object]) -> Path:
        final, partial = self.path / name, self.path / f"{_TEMPORARY}{name}-{os.getpid()}"
        partial.mkdir()
        try:
            fill(partial)
            for folder, _, files in os.walk(partial):
                for file in files:
                    _flush(Path(folder) / file)
                _flush(Path(folder))
            partial.rename(final)
            _flush(self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def _sweep(self) -> None:
        """Delete what a killed run left half written."""
        for entry in self.path.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(entry, ignore_errors=True)

    def _delete_old(self) -> None:
        best = self.best()
        kept = {checkpoint.path for checkpoint in self.all()[-self.keep :]} | ({best.path} if best else set())
        for entry in self.path.iterdir():
            if _NAME.fullmatch(entry.name) and entry not in kept:
                shutil.rmtree(entry)


def random_state() -> dict[str, Any]:
    """State of the global random generators of torch, numpy and Python, as tensors and plain values."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = numpy_state
    version, internal, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), following],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the global random generators back where `random_state` was called."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]
