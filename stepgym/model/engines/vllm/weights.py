"""The weights that servers have: new ones, adapters, sleep, and what a restarted server has to be told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepgym.env.worker import threads
from stepgym.errors import EngineError
from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.dialect import Call, TrainerTransfer, WeightStream
from stepgym.model.engines.vllm.member import Member, WeightsName
from stepgym.model.engines.vllm.port import Port
from stepgym.model.engines.vllm.server import VLLMServer

logger = logging.getLogger(__name__)

INITIAL = "initial"
"""Version of the weights that servers are started with."""

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class _State:
    """What the servers have: read and replaced as one, because threads that start servers again read it.

    Attributes:
        name: What the weights are called.
        folder: Where they came from; None: the servers were started with them, or they came by `nccl` or `ipc`.
        adapter: Folder of the adapter over them.
    """

    name: WeightsName
    folder: Path | None = None
    adapter: Path | None = None


class Weights:
    """What all servers of an engine sample from. They change together.

    No response ever bears the name of weights that did not sample it. Where a change fails half-way, what is being
    sampled on the servers that failed is aborted, and requests are refused until a later change succeeds.

    Args:
        members: The servers; the list may still grow.
        transfer: How new weights arrive: `file`, `nccl` or `ipc`.
        sleep_level: What a server gives back when it sleeps; 0: it never does.
        workers: Processes of one server that hold weights.

    Attributes:
        export: For `nccl` and `ipc`: writes the current weights to a model folder, for a server that is started again.
    """

    def __init__(self, members: list[Member], *, transfer: str, sleep_level: int, workers: int) -> None:
        self.export: Callable[[], Path] | None = None
        self._members = members
        self._transfer = transfer
        self._sleep_level = sleep_level
        self._workers = workers
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin anew, with servers that are not started yet."""
        self._state = _State(WeightsName(INITIAL))
        self._uncertain = ""
        self._trainer: TrainerTransfer | None = None
        self._group: list[tuple[VLLMServer, int]] = []
        self._asleep: Literal["", "all", "cache"] = ""
        self._waking = False
        self._updating = False
        self._holding = False

    @property
    def name(self) -> WeightsName:
        """What they are called."""
        return self._state.name

    @property
    def version(self) -> str:
        """Their version."""
        return self._state.name.version

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
        if not any(folder.glob("*.safetensors")):
            raise EngineError(f"{folder} holds no safetensors file: the servers keep weights {self.version}")
        async with self._changing() as pause:
            self._uncertain = f"weights {version} did not reach every server: load weights again"
            given = await self._all(dialect.file_update(folder, version), pause=pause)
            self._settle(given, _State(WeightsName(version), folder), restart_with=folder)

    async def load_adapter(self, folder: Path, version: str) -> None:
        """Give all servers a LoRA adapter (PEFT format), to be sampled with from now on.

        The base weights stay. What is being sampled is waited for: it needs the adapter of before, which a server may
        have to read from its folder again. `folder` must stay until the next call. Raises `EngineError`.
        """
        old, new = self._state, WeightsName(version, adapter=True)
        if old.name == new:
            return  # a name is given once: what was sampled under it was sampled from this
        async with self._changing(drain=True):
            given = await self._each(lambda server: self._add_adapter(server, new, folder))
            self._settle(given, _State(new, old.folder, folder))
        if old.name.adapter:
            try:
                await self._all([dialect.unload_adapter(old.name.model)])
            except EngineError as error:  # nobody asks for it any more
                logger.info("adapter %s stays on a server: %s", old.name.model, error)

    async def send(self, stream: WeightStream, version: str) -> None:
        """Send weights from the trainer's GPU to all servers, by `nccl` or `ipc`. Raises `EngineError`.

        Args:
            stream: Makes a fresh pass over (name, tensor), named as in a Hugging Face model folder.
            version: Name of the weights.
        """
        async with self._changing() as pause:
            servers = self._alive()
            await asyncio.gather(*(server.ready() for server in servers))
            starts = {server: server.starts for server in servers}
            self._uncertain = f"weights {version} did not reach every server: send weights again"
            # In one thread from the pause to the end, so that giving up waiting for it leaves nothing undone.
            await threads.run(self._send, stream, version, pause, starts)
            self._settle(starts, _State(WeightsName(version)))

    def close(self) -> None:
        """Leave the group that sends weights."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            with contextlib.suppress(Exception):  # of a group that may have lost its other members
                trainer.close()

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
        """Return when requests may be sent: nothing sleeps, and no update waits for them to end.

        Raises `EngineError` where the last update failed half-way.
        """
        while True:
            if self._holding or self._waking:
                await asyncio.sleep(_POLL_S)
            elif self._uncertain and not self._updating:
                raise EngineError(self._uncertain)
            elif self._asleep:
                await self._wake_all()
            else:
                return

    async def _wake_all(self) -> None:
        self._waking = True  # whoever else comes waits until all memory is there
        try:
            await self.wake()
            await self._all([dialect.WAKE_CACHE])
            self._asleep = ""
        finally:
            self._waking = False

    # ---- starting again -----------------------------------------------------------------------------------------

    def before_restart(self, server: VLLMServer) -> None:
        """Called before a server that died is started again: it shall load the latest weights."""
        if self._transfer != "file" and self.version != INITIAL:
            if self.export is None:
                raise EngineError(f"weights that came by {self._transfer} are on no disk (Weights.export is not set)")
            server.restart_with(model=self.export())

    def hand_over(self, server: VLLMServer) -> None:
        """Give a server that was just started what it lacks, and tell it how that is called. Raises `EngineError`.

        The weights may have changed since it was started: it is given those of now. After this, `_settle` sees that it
        was started again.
        """
        with server.administration:
            if self._transfer == "file":
                server.call(dialect.INIT_FILE_TRANSFER)
            told: _State | None = None
            while told is not self._state:
                with self._lock:
                    told = self._state
                if told.folder is not None and str(told.folder) != server.started_with.model:
                    for call in dialect.file_update(told.folder, told.name.version):
                        server.call(call)
                if told.adapter is not None:
                    self._add_adapter(server, told.name, told.adapter)
                else:
                    server.call(dialect.name_version(told.name.version))

    def _settle(self, given: dict[VLLMServer, int], state: _State, *, restart_with: Path | None = None) -> None:
        """From now on the servers have these weights. Raises `EngineError` where one was started again meanwhile."""
        with self._lock:
            for server, starts in given.items():
                if server.starts != starts:
                    raise EngineError(f"{server.url} died while its weights were changed")
            self._state = state
            if restart_with is not None:
                for member in self._members:
                    member.server.restart_with(model=restart_with)
        self._uncertain = ""

    # ---- inside -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _changing(self, *, drain: bool = False) -> AsyncIterator[bool]:
        """Within, weights may change. Yields whether sampling must be paused for that; else nothing is under way.

        With `drain` nothing is under way in any case.
        """
        while self._updating or self._waking:
            await asyncio.sleep(_POLL_S)
        drained = [member for member in self._members if drain or member.api == "completions"]
        self._updating, self._holding = True, bool(drained or self._asleep)
        try:
            await self.wake()
            while any(member.under_way for member in drained):
                await asyncio.sleep(_POLL_S)
            yield not self._holding
        finally:
            self._updating = self._holding = False

    def _alive(self) -> list[VLLMServer]:
        """The servers that are not dead for good. Raises `EngineError` where there is none."""
        servers = [member.server for member in self._members]
        alive = [server for server in servers if server.failure is None]
        if not alive:
            raise EngineError(str(servers[0].failure) if servers else "the engine is not open")
        return alive

    async def _all(self, calls: Sequence[Call], *, pause: bool | None = None) -> dict[VLLMServer, int]:
        """Send requests, in order, to all servers at once; between a pause and a resume, or with caches cleared."""
        return await self._each(lambda server: self._administer(server, calls, pause))

    async def _each(self, work: Callable[[VLLMServer], None]) -> dict[VLLMServer, int]:
        """Run `work` for every server that lives, once it is ready. Returns which start of each server it was."""

        async def one(server: VLLMServer) -> int:
            await server.ready()
            starts = server.starts  # before the work: one that is started again meanwhile is told the old weights' name
            await threads.run(work, server)
            return starts

        alive = self._alive()
        found = await asyncio.gather(*(one(server) for server in alive), return_exceptions=True)
        still = set(self._alive())
        for server, result in zip(alive, found, strict=True):
            if isinstance(result, BaseException) and server in still:
                raise result
        return {s: starts for s, starts in zip(alive, found, strict=True) if isinstance(starts, int) and s in still}

    def _administer(self, server: VLLMServer, calls: Sequence[Call], pause: bool | None) -> None:
        with server.administration:
            try:
                if pause:
                    server.call(dialect.PAUSE)
                for call in calls:
                    server.call(call)
            except BaseException:
                if pause is not None:
                    _attempt(server, dialect.GIVE_UPDATE_UP)
                if pause:
                    _abort(server)
                raise
            if pause:
                server.call(dialect.RESUME)
            elif pause is False and not self._asleep:
                server.call(dialect.CLEAR_CACHE)

    def _add_adapter(self, server: VLLMServer, name: WeightsName, folder: Path) -> None:
        with server.administration:
            try:
                server.call(dialect.load_adapter(name.model, folder))
            except EngineError:
                # It may be there from an earlier attempt. (A request to load "in place" would stay with the adapter,
                # and vLLM would read it from disk again for every token.)
                server.call(dialect.unload_adapter(name.model))
                server.call(dialect.load_adapter(name.model, folder))

    def _send(self, stream: WeightStream, version: str, pause: bool, given: dict[VLLMServer, int]) -> None:
        servers = list(given)
        with contextlib.ExitStack() as held:
            for server in servers:
                held.enter_context(server.administration)
            try:
                for server in servers if pause else ():
                    server.call(dialect.PAUSE)
                self._transmit(stream, list(given.items()))
                for server in servers:
                    server.call(dialect.name_version(version))
                    if not pause and not self._asleep:
                        server.call(dialect.CLEAR_CACHE)
            except BaseException:
                self.close()  # a group in which one has failed is of no more use
                for server in servers if pause else ():
                    _abort(server)
                raise
            for server in servers if pause else ():
                server.call(dialect.RESUME)

    def _transmit(self, stream: WeightStream, group: list[tuple[VLLMServer, int]]) -> None:
        """Send the weights to a group of servers, each in its present start."""
        if self._trainer is not None and group != self._group:
            self.close()
        if self._trainer is None:
            sizes, urls = [self._workers] * len(group), [server.url for server, _ in group]
            with Port() as port:  # held until the group has met there
                self._trainer = TrainerTransfer(self._transfer, stream, urls, sizes, port=port.number)
            self._group = group
        self._trainer.send(stream)


def _abort(server: VLLMServer) -> None:
    """End what is being sampled on a server whose weights may be anything, and let it go on."""
    _attempt(server, dialect.PAUSE_AND_ABORT)
    _attempt(server, dialect.RESUME)


def _attempt(server: VLLMServer, call: Call) -> None:
    with contextlib.suppress(EngineError):
        server.call(call)
