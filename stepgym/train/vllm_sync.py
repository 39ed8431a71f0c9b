"""From the trained policy to vLLM servers: through files, from GPU to GPU, or as a LoRA adapter."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError

from stepgym.config import validate
from stepgym.env.worker import threads
from stepgym.errors import EngineError, UserError
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig
from stepgym.train.recipe import PretrainedModel, Recipe, engine_fields
from stepgym.train.sync import Gathered, Progress, WeightSync
from stepgym.train.weights import gathered, whole_tensors, write_weights

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
COPIES = 4
"""Room for so many copies of the weights: the first ones, the current ones, the next ones, and one to spare."""
PUBLISH_TRIES = 3
_BETWEEN_TRIES_S = 2.0
_ONE_FILE = 2**62
_PREFIX, _LOCK = "stepgym-weights-", ".lock"


class VLLMSync(WeightSync):
    """vLLM servers that get the policy's weights after every update.

    By `transfer: file` each version is a Hugging Face model folder of its own, written whole or not at all; under LoRA
    it is a PEFT adapter, whatever `transfer` says. A version's folder stays until a later one has reached every server,
    because a server that dies starts again from it. By `nccl` and `ipc` nothing is written.

    The servers compute in the type that the policy computes in (`engine.dtype` changes that), and weights are written
    in the servers' type. They start while the warm start runs, unless they have to share the GPU with it
    (`sleep_level`).
    """

    waits_for = "vllm"
    overlaps = True
    gathers = True
    without: ClassVar[Mapping[str, str]] = {
        "model": "in training the engine serves the policy's own model; see `model`",
        "tokenizer": "in training the engine has the policy's own tokenizer; see `model`",
    }

    @classmethod
    def check(cls, recipe: Recipe) -> dict[str, Any]:
        """The checked fields of the engine; see `WeightSync.check`."""
        fields = super().check(recipe)
        if recipe.overlap.kind != "none" and fields.get("sleep_level"):
            raise UserError(
                "engine.sleep_level: the servers cannot give their memory to the trainer where they sample while it "
                f"trains (overlap.kind: {recipe.overlap.kind}); use 0, and a GPU for each"
            )
        lora = validate(PolicyConfig, recipe.policy, "policy").lora
        if lora is None and fields.get("lora_rank"):
            raise UserError("engine.lora_rank: the policy trains no adapter; set policy.lora, or leave this out")
        if lora is not None:
            if fields.setdefault("lora_rank", lora.rank) < lora.rank:
                raise UserError(f"engine.lora_rank: {fields['lora_rank']} is less than policy.lora.rank, {lora.rank}")
            if fields.get("sleep_level") == 2:
                raise UserError(
                    "engine.sleep_level: 2 drops the weights below the adapter, and nobody sends them; use 1"
                )
        return fields

    @classmethod
    def suited(cls, recipe: Recipe, processes: int) -> type[WeightSync]:
        """This one. Raises `UserError` where weights of several processes shall not go through files."""
        transfer = engine_fields(recipe).get("transfer", "file")
        if processes > 1 and transfer != "file":
            raise UserError(
                f"engine.transfer: {transfer!r} is for one training process, and there are {processes}; use file"
            )
        return super().suited(recipe, processes)

    @classmethod
    def gather(cls, recipe: Recipe, policy: Policy, *, start: bool = False) -> Gathered:
        """The adapter, or all weights, in the servers' type; see `WeightSync.gather`."""
        if policy.processes.size == 1 or (start and isinstance(recipe.model, PretrainedModel)):
            return None
        if policy.adapter is not None and not start:
            return gathered(policy.adapter.tensors(), keep=policy.processes.is_lead)
        dtype = _TYPES.get(cls.check(recipe).get("dtype", _NAMES[policy.compute_dtype]))
        return gathered(whole_tensors(policy.model, policy.adapter), keep=policy.processes.is_lead, dtype=dtype)

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        tokenizer: Any,
        folder: Path,
        *,
        plain: Any = None,
        weights: Gathered = None,
    ) -> None:
        fields = self.check(recipe)
        fields.setdefault("dtype", _NAMES[policy.compute_dtype])
        fields.setdefault("log_folder", str(folder))
        self._policy = policy
        self._tokenizer = tokenizer
        self._dtype = _TYPES.get(fields["dtype"])  # None ("auto"): the weights' own
        self._root, self._lock = _make_root(fields.get("sync_path"), _size(policy, self._dtype))
        self._sleep_level = fields.get("sleep_level", 0)
        self._count = 0
        self._version: str | None = None
        self._folders: list[Path] = []
        try:
            if isinstance(recipe.model, PretrainedModel):
                fields["model"] = recipe.model.path
            else:
                fields["model"] = str(self._write("model", lambda folder: self._write_initial(folder, weights)))
            self.engine = self._engine = VLLMEngine(**fields)
            if not isinstance(recipe.model, PretrainedModel):
                self._engine.model = recipe.model.kind  # in records, in place of a folder that will be gone
        except BaseException:
            self._delete()
            raise
        if policy.adapter is None:
            self._engine.weights.export = lambda: self._write_next("restart")

    async def start(self) -> None:
        """Let the servers start, unless they would take the GPU's memory from the warm start."""
        if not self._sleep_level:
            await self._engine.start()

    async def open(self, progress: Progress | None = None) -> None:
        """Wait until every server is healthy."""
        self._engine.on_progress = progress
        try:
            await self._engine.open()
        finally:
            self._engine.on_progress = None

    async def publish(self, version: str, weights: Gathered = None) -> None:
        """Give all servers the policy's weights; see `WeightSync.publish`. Tried again where a server died of it."""
        dropped = self._sleep_level == 2
        if version == self._version and not dropped:
            return
        adapter = self._policy.adapter
        if adapter is None and self._engine.transfer != "file":
            await self._engine.send_weights(self._policy.named_tensors, version)
            self._version = version
            return
        folder = await threads.run(self._write_next, version, weights)
        for attempt in range(1, PUBLISH_TRIES + 1):
            try:
                load = self._engine.load_weights if adapter is None else self._engine.load_adapter
                await load(folder, version)
                break
            except EngineError as error:
                if attempt == PUBLISH_TRIES:
                    raise
                logger.warning("weights %s did not reach every server (%s); they are sent again", version, error)
                await asyncio.sleep(_BETWEEN_TRIES_S)  # for it to be noticed that a server is gone
        self._version = version
        old, self._folders = self._folders, [folder]
        for path in old:
            await threads.run(_remove, path)

    async def before_update(self) -> None:
        """The servers give their GPU memory back, as `sleep_level` says."""
        await self._engine.sleep()

    async def after_update(self) -> None:
        """The servers take memory for weights again."""
        await self._engine.wake()

    async def close(self) -> None:
        """End the servers and delete what was written for them."""
        await self._engine.close()
        await threads.run(self._delete)

    # ---- files --------------------------------------------------------------------------------------------------

    def _write_next(self, version: str, weights: Gathered = None) -> Path:
        """A folder of its own with the weights (or the adapter) as they are now."""
        self._count += 1
        adapter = self._policy.adapter

        def fill(folder: Path) -> None:
            if adapter is None:
                self._write_weights(folder, weights)
            else:
                adapter.save(folder, weights)

        return self._write(f"{self._count:06d}-{version}", fill)

    def _write_weights(self, folder: Path, weights: Gathered) -> None:
        if weights is None:
            self._policy.save(folder, dtype=self._dtype, max_shard_size=_ONE_FILE)
        else:
            write_weights(self._policy.model, dict(weights), folder, max_shard_size=_ONE_FILE)

    def _write_initial(self, folder: Path, weights: Gathered) -> None:
        # Under LoRA this is the model below the adapter, which is merged into it; a new adapter changes nothing.
        self._write_weights(folder, weights)
        self._tokenizer.save_pretrained(folder)

    def _delete(self) -> None:
        _remove(self._root)
        self._lock.close()

    def _write(self, name: str, fill: Callable[[Path], None]) -> Path:
        partial, final = self._root / f".partial-{name}", self._root / name
        try:
            fill(partial)
            partial.rename(final)
        except BaseException as error:
            _remove(partial)
            if isinstance(error, (OSError, SafetensorError)):
                raise EngineError(f"weights cannot be written to {final}: {error}") from error
            raise
        return final


_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {torch.float64: "float32", **{dtype: name for name, dtype in _TYPES.items()}}


def _size(policy: Policy, dtype: torch.dtype | None) -> int:
    """Bytes of the policy's weights on disk."""
    parameters: Any = policy.model.parameters()
    return sum(parameter.numel() * (dtype or parameter.dtype).itemsize for parameter in parameters)


def _make_root(given: str | None, size: int) -> tuple[Path, TextIOWrapper]:
    """A fresh folder for a run's versions, and its lock: within `given`, else in shared memory where there is room.

    What killed runs left there is deleted: main memory, in shared memory.
    """
    parent = Path(tempfile.gettempdir())
    if given is not None:
        parent = Path(given).expanduser()
    elif SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        _sweep(SHARED_MEMORY)
        if shutil.disk_usage(SHARED_MEMORY).free > COPIES * size:
            parent = SHARED_MEMORY
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        partial = root / f"{_LOCK}.partial"
        lock = partial.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        partial.rename(root / _LOCK)  # seen by others only now that it is held: they delete what nobody holds
    except OSError as error:
        raise UserError(f"engine.sync_path: {parent}: cannot write here: {error.strerror}") from None
    return root, lock


def _sweep(parent: Path) -> None:
    """Delete the folders of runs that are no more: those whose lock nobody holds."""
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with path.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path.parent)
        except OSError:
            continue  # in use, or another user's


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
