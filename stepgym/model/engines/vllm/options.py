"""What a vLLM server is started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepgym.errors import UserError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one server is started with.

    Attributes:
        python: Interpreter of the environment that has vLLM.
        cpu: Whether that is the build for the CPU.
        model: Folder or hub name of the model.
        tokenizer: Folder or hub name of its tokenizer.
        name: Name under which it serves the model.
        port: TCP port on 127.0.0.1.
        dtype: Type of weights and activations.
        context_length: Most tokens, prompt and response together; None: what the model's config says.
        tensor_parallel, data_parallel: Numbers of ranks.
        max_sequences: Requests that are computed at once.
        gpu_memory_utilization: Share of the GPU's memory; None leaves it to vLLM.
        cpu_cache_gb: GiB of memory for keys and values, on the CPU.
        prefix_caching: Whether keys and values of equal beginnings are kept.
        transfer: How weights arrive: `file`, `nccl` or `ipc`.
        lora_rank: Highest rank of an adapter; 0 without adapters.
        sleep: Whether the server can be put to sleep.
        share_cores: Whether other servers run on the same CPU cores.
        extra_args: Further arguments.
        environment: Further environment variables.
        plugin_folder: Folder with this file under the name `dialect.MODULE`, for the server's import path.
    """

    python: str
    cpu: bool
    model: str
    tokenizer: str
    name: str
    port: int
    plugin_folder: str
    dtype: str = "auto"
    context_length: int | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    max_sequences: int = 256
    gpu_memory_utilization: float | None = None
    cpu_cache_gb: float = 1.0
    prefix_caching: bool = True
    transfer: str = "file"
    lora_rank: int = 0
    sleep: bool = False
    share_cores: bool = False
    extra_args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `UserError` for an extra argument that would overrule one of ours: promises rest on those."""
        from stepgym.model.engines.vllm import dialect

        ours = {_flag(word) for word in dialect.command(replace(self, extra_args=())) if word.startswith("--")}
        for word in self.extra_args:
            if word.startswith("-") and _flag(word) in {*ours, *dialect.NO_EXTRA_ARGS}:
                shown = word.partition("=")[0]
                raise UserError(
                    f"engine.extra_args: {shown} is set by stepgym itself; leave it out (most of these have a field of "
                    "the engine: see docs/vllm.md)"
                )


def _flag(word: str) -> str:
    """An argument's name as vLLM reads it: with dashes, with neither value nor negation."""
    name = word.partition("=")[0]
    dashes = name[: len(name) - len(name.lstrip("-"))]
    return dashes + name.lstrip("-").replace("_", "-").removeprefix("no-")
