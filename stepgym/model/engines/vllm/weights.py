"""The weights that servers have: new ones, adapters, sleep, and what a restarted server has to be told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from stepgym.env.worker import threads
from stepgym.errors import EngineError
from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.dialect import Call, TrainerTransfer, WeightStream
from stepgym.model.engines.vllm.member import Member, WeightsName
from stepgym.model.engines.vllm.server import VLLMServer, free_ports

INITIAL = "initial"
"""Version of the weights that servers are started with."""

_POLL_S = 0.005


class Weights:
    """What all servers of an engine sample from. They change together.

    Args:
        members: The servers; the list may still grow.
        transfer: How new weights arrive: `file`, `nccl` or `ipc`.
        sleep_level: What a server gives back when it sleeps; 0: it never does.
        workers: Processes of one server that hold weights.

    Attributes:
        name: What they are called.
        export: For `nccl` and `ipc`: writes the current weights to a model folder, for a server that is started again.
    """

    def __init__(self, members: list[Member], *, transfer: str, sleep_level: int, workers: int) -> None:
        self.name = WeightsName(INITIAL)
        self.export: Callable[[], Path] | None = None
        self._members = members
        self._transfer = transfer
        self._sleep_level = sleep_level
        self._workers = workers
        self._adapter: Path | None = None
        self._trainer: TrainerTransfer | None = None
        self._asleep: Literal["", "all", "cache"] = ""
        self._updating = False

    @property
    def version(self) -> str:
        """Their version."""
        return self.name.version

    async def load(self, folder: Path, version: str) -> None:
        """Give all servers the weights in a model folder, without restarting them.

        Args:
            folder: A Hugging Face model folder (`config.json`, `*.safetensors`). It must stay until the next call: a
                server that dies starts again from it.
            version: Name of the weights; responses say which sampled them.

        Raises `EngineError` where a server does not take them.
        """
        if self._transfer != "file":
            raise EngineError(f"the servers take weights by {self._transfer}, not from files")
        async with self._changing() as pause:
            await self._all(dialect.file_update(folder, version), pause=pause)
            self.name = WeightsName(version)
            for member in self._members:
                member.server.restart_with(model=folder)

    async def load_adapter(self, folder: Path, version: str) -> None:
        """Give all servers a LoRA adapter (PEFT format), to be sampled with from now on.

        The base weights stay. `folder` must stay until the next call. Raises `EngineError`.
        """
        old, new = self.name, WeightsName(version, adapter=True)
        if old == new:
            return  # a name is given once: what was sampled under it was sampled from this
        async with self._changing():
            await self._all([dialect.load_adapter(new.model, folder)])
            self.name, self._adapter = new, folder
        if old.adapter:
            await self._all([dialect.unload_adapter(old.model)])

    async def send(self, stream: WeightStream, version: str) -> None:
        """Send weights from the trainer's GPU to all servers, by `nccl` or `ipc`. Raises `EngineError`.

        Args:
            stream: Makes a fresh pass over (name, tensor), named as in a Hugging Face model folder.
            version: Name of the weights.
        """
        async with self._changing() as pause:
            if pause:
                await self._all([dialect.PAUSE])
            try:
                await threads.run(self._send, stream)
                await self._all([dialect.name_version(version), *([] if pause else [dialect.CLEAR_CACHE])])
            finally:
                if pause:
                    await self._all([dialect.RESUME])
            self.name = WeightsName(version)

    def _send(self, stream: WeightStream) -> None:
        if self._trainer is None:
            sizes = [self._workers] * len(self._members)
            urls = [member.server.url for member in self._members]
            self._trainer = TrainerTransfer(self._transfer, stream, urls, sizes, port=free_ports(1)[0])
        self._trainer.send(stream)

    def close(self) -> None:
        """Leave the group that sends weights."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    # ---- sleep --------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Let the servers give back GPU memory; nothing at level 0. Nothing may be under way."""
        if self._sleep_level and not self._asleep:
            await self._all([dialect.sleep(self._sleep_level)])
            self._asleep = "all"

    async def wake(self) -> None:
        """Let the servers take memory for their weights again; that for keys and values follows when it is needed."""
        if self._asleep == "all":
            await self._all([dialect.WAKE_WEIGHTS])
            self._asleep = "cache"

    async def usable(self) -> None:
        """Return when requests may be sent: nothing sleeps, and no update waits for them to end."""
        while self._updating and any(member.api == "completions" for member in self._members):
            await asyncio.sleep(_POLL_S)
        if self._asleep:
            await self.wake()
            if self._asleep == "cache":
                self._asleep = ""
                await self._all([dialect.WAKE_CACHE])

    # ---- starting again -----------------------------------------------------------------------------------------

    def before_restart(self, server: VLLMServer) -> None:
        """Called before a server that died is started again: it shall load the latest weights."""
        if self._transfer != "file" and self.version != INITIAL:
            if self.export is None:
                raise EngineError(f"weights that came by {self._transfer} are on no disk (Weights.export is not set)")
            server.restart_with(model=self.export())
            self._trainer = None  # its group has lost a member; the next send makes another

    def hand_over(self, server: VLLMServer) -> None:
        """Tell a server that was just started what it has to know. Raises `EngineError`."""
        if self._transfer == "file":
            server.call(dialect.INIT_FILE_TRANSFER)
        if self._adapter is not None:
            server.call(dialect.load_adapter(self.name.model, self._adapter))
        else:
            server.call(dialect.name_version(self.version))

    # ---- inside -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[bool]:
        """Within, weights may change. Yields whether sampling must be paused for that; else nothing is under way."""
        self._updating = True
        try:
            await self.wake()
            drained = [member for member in self._members if member.api == "completions"]
            while any(member.under_way for member in drained):
                await asyncio.sleep(_POLL_S)
            yield not drained and not self._asleep
        finally:
            self._updating = False

    async def _all(self, calls: Sequence[Call], *, pause: bool | None = None) -> None:
        """Send requests, in order, to all servers at once; between a pause and a resume, or with caches cleared."""
        await asyncio.gather(*(threads.run(self._administer, member.server, calls, pause) for member in self._members))

    def _administer(self, server: VLLMServer, calls: Sequence[Call], pause: bool | None) -> None:
        if pause:
            server.call(dialect.PAUSE)
        try:
            for call in calls:
                server.call(call)
            if pause is False and not self._asleep:
                server.call(dialect.CLEAR_CACHE)
        finally:
            if pause:
                server.call(dialect.RESUME)
