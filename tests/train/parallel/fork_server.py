"""Runs functions of test files in several processes that talk to each other by gloo.

Importing torch takes seconds, so it is done once: this program imports it, then forks as many ranks as each line on its
standard input asks for: {"file", "function", "size", "arguments"}. It answers with one line of JSON: a list of
{"code", "result", "error"}, by rank.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from stepgym.train.parallel.processes import Processes

# Imported here so that the ranks need not.
for name in (
    "pytest", "hypothesis", "peft", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "stepgym.cli.train", "stepgym.cli.training_table", "stepgym.train.checkpoint", "stepgym.train.loop",
):  # fmt: skip
    importlib.import_module(name)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def load(file: str) -> Any:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rank_main(request: dict[str, Any], rank: int, port: int, answer: Path) -> None:
    """One rank: from here on it is a process of its own."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["size"]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function = getattr(load(request["file"]), request["function"])
        with Processes.start("cpu") as processes:
            result = function(processes, **request["arguments"])
        answer.write_text(json.dumps({"code": 0, "result": result, "error": None}))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        answer.write_text(json.dumps({"code": 1, "result": None, "error": text, "trace": traceback.format_exc()}))


def serve(folder: Path) -> None:
    for number, line in enumerate(sys.stdin):
        request, port = json.loads(line), free_port()
        ranks: dict[int, Path] = {}
        for rank in range(request["size"]):
            answer = folder / f"{number}-{rank}.json"
            pid = os.fork()
            if pid == 0:
                rank_main(request, rank, port, answer)
                sys.stderr.flush()
                os._exit(0)
            ranks[pid] = answer
        deadline = time.monotonic() + request["timeout"]
        alive = set(ranks)
        while alive and time.monotonic() < deadline:
            alive = {pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.02)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        dead = {"code": -1, "result": None, "error": "the process died or hung", "trace": ""}
        answers = [json.loads(path.read_text()) if path.exists() else dead for path in ranks.values()]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
