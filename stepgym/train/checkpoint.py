"""Checkpoints: written whole or not at all, and read back to the bit-identical next update.

A checkpoint is a folder `update-00000120/` (`update-00000120.1/` where one of that update was there before). `model/`
is in the format of `transformers` (safetensors, with the tokenizer), so that it can be served as it is. Under LoRA the
adapter is merged into it, and stands by itself in `adapter/`, in the format of PEFT. `state/` holds what training goes
on from, as tensors: the weights that are trained, the optimizer's averages, the random generators; each process writes
and reads its shards, and any number of processes reads what any number wrote. `state.json` holds the counters, the
score, what the caller keeps, and the names and sizes of the files in `state/`. No file is pickled or unpickled.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from stepgym.errors import UserError
from stepgym.train.learner import Learner
from stepgym.train.parallel.nested_state import put_together, take_apart
from stepgym.train.parallel.processes import Processes
from stepgym.train.parallel.tensor_files import load_tensors, save_tensors, saved_tensors
from stepgym.train.policy import Policy
from stepgym.train.random_state import random_state, set_random_state
from stepgym.train.weights import gathered

logger = logging.getLogger(__name__)

_NAME = re.compile(r"update-(?P<update>\d{8,})(?:\.(?P<revision>\d+))?")
_TEMPORARY = ".partial-"
_REFERENCE = "reference"
_FORMAT = 2
_MODEL_FILE_BYTES = "5GB"


class Stateful(Protocol):
    """Something whose state is part of a checkpoint.

    `state_dict` gives nested dicts with texts as keys, of tensors (the live ones: they are read in place) and plain
    JSON values. `load_state_dict` is given the same with the values that were saved.
    """

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102

    def load_state_dict(self, state: dict[str, Any]) -> None: ...  # noqa: D102


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
        path: Their folder, the same for all processes; made when the first is written.
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
        parts: Mapping[str, Stateful] | None = None,
        tokenizer: Any = None,
        score: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint of the learner as it is now, then delete those that are no longer kept. Collective.

        It is written under a temporary name, flushed to the disk and renamed, so a killed run leaves it whole or not
        at all. It takes the place of a checkpoint of the same update, which is deleted afterwards.

        Args:
            learner: What is saved: weights, optimizer, counters; and its reference, once per store.
            parts: What else is saved, by name.
            tokenizer: Saved beside the model where given.
            score: What the best one is picked by.
            extra: What the caller wants back on resuming, as JSON.
        """
        if score is not None and not math.isfinite(score):
            raise UserError(f"checkpoints: the score must be finite, not {score}")
        processes, policy = learner.policy.processes, learner.policy
        self._save_reference(learner)
        tensors, plain = take_apart(_state_of(learner, parts))
        own, own_plain = take_apart({"random": {str(processes.rank): random_state()}})
        state = {
            "format": _FORMAT,
            "update": learner.updates,
            "score": score,
            "extra": dict(extra or {}),
            "plain": plain,
            "random": processes.gather(own_plain),
        }
        json.dumps(state, allow_nan=False)  # what is no JSON shows before anything is written

        def save_adapter(folder: Path) -> None:
            if policy.adapter is not None:
                weights = gathered(policy.adapter.tensors(), keep=processes.is_lead)
                if weights is not None:
                    policy.adapter.save(folder, weights)

        def fill(folder: Path) -> None:
            processes.together(lambda: policy.save(folder / "model", max_shard_size=_MODEL_FILE_BYTES))
            processes.together(lambda: save_adapter(folder / "adapter"))
            save_tensors(tensors | own, folder / "state", processes)

        def finish(folder: Path) -> None:
            if tokenizer is not None:
                tokenizer.save_pretrained(folder / "model")

        path = self._write(lambda: self._free_name(learner.updates), state, fill, finish, processes)
        processes.lead(self._delete_old)
        return Checkpoint(path, learner.updates, score, dict(extra or {}))

    def restore(
        self, learner: Learner, checkpoint: Checkpoint | None = None, *, parts: Mapping[str, Stateful] | None = None
    ) -> Checkpoint | None:
        """Put a learner back where a checkpoint was written; the latest where none is given. Collective.

        Weights are copied into the learner's model, which an engine may share. The number of processes may be another
        than the one that wrote it; random generators are put back on as many as there were then. Returns the
        checkpoint, or None (and changes nothing) where the store is empty.

        Raises:
            UserError: The checkpoint does not fit the learner, or a file of it cannot be read.
        """
        processes = learner.policy.processes
        checkpoint = processes.lead(lambda: checkpoint or self.latest())
        if checkpoint is None:
            return None
        self._restore_reference(learner)
        path = checkpoint.path
        state = processes.together(lambda: _read_state(path))
        tensors, _ = take_apart(_state_of(learner, parts))
        there = processes.together(lambda: _saved(path, state))
        if odd := sorted(name for name in there if name not in tensors and not name.startswith("random/")):
            # A weight says more than its averages in the optimizer, which are missing with it.
            first = next((name for name in odd if name.startswith("policy/")), odd[0])
            raise UserError(f"checkpoint {path}: {first} is in it, and nothing here has that name")
        own: dict[str, torch.Tensor] = {}
        if processes.rank < len(state["random"]):
            own, _ = take_apart({"random": {str(processes.rank): random_state()}})
            own = {name: tensor for name, tensor in own.items() if name in there}  # a GPU's may not be
        load_tensors(tensors | own, path / "state", processes)
        found = put_together(tensors, state["plain"])
        for name, part in _parts(learner, parts).items():
            try:
                part.load_state_dict(found[name])
            except (KeyError, ValueError, RuntimeError, TypeError) as error:
                raise UserError(f"checkpoint {path}: its {name} does not fit: {_first_line(error)}") from error
        if own:
            generators = put_together(own, state["random"][processes.rank])
            set_random_state(generators["random"][str(processes.rank)])
        return checkpoint

    # ---- within -------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> Checkpoint:
        state = _read_state(path)
        return Checkpoint(path, state["update"], state["score"], state["extra"])

    def _save_reference(self, learner: Learner) -> None:
        """Write the reference, where it has weights of its own and is not there yet."""
        reference, processes = learner.reference, learner.policy.processes
        # Under LoRA the reference is the model as it was loaded: nothing that would have to be kept.
        if reference is None or reference.adapter is not None:
            return
        if processes.lead((self.path / _REFERENCE).exists):
            return
        state = {"format": _FORMAT}
        with _in_place(reference):
            self._write(
                lambda: _REFERENCE,
                state,
                lambda folder: save_tensors(_weights(reference), folder / "state", processes),
                lambda folder: None,
                processes,
            )

    def _restore_reference(self, learner: Learner) -> None:
        reference, processes, path = learner.reference, learner.policy.processes, self.path / _REFERENCE
        if reference is None or reference.adapter is not None:
            return
        if not processes.lead(path.exists):  # it is written before the first checkpoint
            raise UserError(f"checkpoint {path}: it is missing, and the KL term needs what is in it")
        processes.together(lambda: _saved(path, _read_json(path)))
        with _in_place(reference):
            load_tensors(_weights(reference), path / "state", processes)

    def _write(
        self,
        name: Callable[[], str],
        state: dict[str, Any],
        fill: Callable[[Path], None],
        finish: Callable[[Path], None],
        processes: Processes,
    ) -> Path:
        """Write a folder whole or not at all: `fill` on all ranks, then `finish` and `state.json` on rank 0.

        An error is one on all ranks, whose it was.
        """

        def begin() -> tuple[Path, Path]:
            self.path.mkdir(parents=True, exist_ok=True)
            self._sweep()
            chosen = name()
            partial = self.path / f"{_TEMPORARY}{chosen}-{os.getpid()}"
            (partial / "state").mkdir(parents=True)
            return partial, self.path / chosen

        def end() -> None:
            finish(partial)
            files = {file.name: file.stat().st_size for file in sorted((partial / "state").iterdir())}
            text = json.dumps(state | {"files": files}, indent=2, allow_nan=False)
            (partial / "state.json").write_text(text, encoding="utf-8")
            for folder, _, names in os.walk(partial):
                for file in names:
                    _flush(Path(folder) / file)
                _flush(Path(folder))
            partial.rename(final)
            _flush(self.path)

        partial, final = processes.lead(begin)
        try:
            fill(partial)
            processes.lead(end)
        except BaseException:
            if processes.is_lead:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def _free_name(self, update: int) -> str:
        name = f"update-{update:08d}"
        present = [match for entry in self.path.iterdir() if (match := _NAME.fullmatch(entry.name))]
        taken = [int(match["revision"] or 0) for match in present if int(match["update"]) == update]
        return f"{name}.{max(taken) + 1}" if taken else name

    def _sweep(self) -> None:
        """Delete what a killed run left half written, or half deleted."""
        for entry in self.path.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(entry, ignore_errors=True)

    def _delete_old(self) -> None:
        best = self.best()
        kept = {checkpoint.path for checkpoint in self.all()[-self.keep :]} | ({best.path} if best else set())
        for entry in self.path.iterdir():
            if _NAME.fullmatch(entry.name) and entry not in kept:
                # Half of one under its name would be taken for a checkpoint that cannot be read.
                shutil.rmtree(entry.rename(self.path / f"{_TEMPORARY}{entry.name}-{os.getpid()}"))


def _parts(learner: Learner, parts: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    named = {"learner": learner, **(parts or {})}
    if len(named) <= len(parts or {}) or not {"policy", "random"}.isdisjoint(named):
        raise UserError("checkpoints: 'learner', 'policy' and 'random' are names that other parts cannot have")
    return named


def _state_of(learner: Learner, parts: Mapping[str, Stateful] | None) -> dict[str, Any]:
    stateful = {name: part.state_dict() for name, part in _parts(learner, parts).items()}
    return {"policy": _weights(learner.policy), **stateful}


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    """The weights that are trained, as they are held: under LoRA the adapter's, perhaps sharded."""
    return {name: weight.detach() for name, weight in policy.model.named_parameters() if weight.requires_grad}


def _in_place(reference: Policy) -> AbstractContextManager[None]:
    """The weights of a reference are where `_weights` finds them."""
    return nullcontext() if reference.frozen is None else reference.frozen.in_place()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["format"] != _FORMAT:
            raise UserError(f"checkpoint {path}: its format is {state['format']}; this version reads {_FORMAT}")
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint {path}: state.json cannot be read: {_first_line(error)}") from error


def _read_state(path: Path) -> dict[str, Any]:
    """`state.json`, with all that a checkpoint's has."""
    state = _read_json(path)
    if missing := [name for name in ("update", "score", "extra", "plain", "random", "files") if name not in state]:
        raise UserError(f"checkpoint {path}: state.json cannot be read: it has no {missing[0]!r}")
    return state


def _saved(path: Path, state: Mapping[str, Any]) -> set[str]:
    """Names of the tensors of a checkpoint, once its files are found to be all there."""
    for name, size in state["files"].items():
        file = path / "state" / name
        if not file.is_file():
            raise UserError(f"checkpoint {path}: its file state/{name} is missing")
        if file.stat().st_size != size:
            raise UserError(f"checkpoint {path}: its file state/{name} has {file.stat().st_size} bytes, not {size}")
    return set(saved_tensors(path / "state"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]
