"""Behaves as a vLLM server does towards its supervisor, and starts at once: for what goes wrong while weights change.

Run as `python stand_in_vllm.py -m ... --port P --model FOLDER`. Its weights are the number in FOLDER/model.safetensors,
and it "samples" that number. The folder in $STAND_IN controls it, by files that hold JSON: `slow-PORT` (seconds by
route; for all ports in $STAND_IN_SLOW), `fail` (a route that answers with HTTP 500), `delay` (seconds from start to
healthy). It writes every request to `log`, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

CONTROL = Path(os.environ["STAND_IN"])
PORT = int(sys.argv[sys.argv.index("--port") + 1])
LOCK = threading.Lock()


def control(name, default):
    path = CONTROL / name
    return json.loads(path.read_text()) if path.exists() else default


def read(folder):
    text = (Path(folder) / "model.safetensors").read_bytes()
    return int(text) if text.isdigit() else 9  # 9: those of a real model


class Server:
    def __init__(self):
        self.weights = read(sys.argv[sys.argv.index("--model") + 1])
        self.version = None
        self.adapters = {}
        self.started = False
        self.going = threading.Event()
        self.going.set()


SERVER = Server()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.answer({"data": [{"id": "policy", "max_model_len": 64}]})
        return self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        path = urlsplit(self.path).path
        with LOCK, (CONTROL / "log").open("a") as log:
            log.write(json.dumps({"port": PORT, "pid": os.getpid(), "path": self.path, "body": body}) + "\n")
        slow = control(f"slow-{PORT}", json.loads(os.environ.get("STAND_IN_SLOW", "{}")))
        time.sleep(slow.get(path, 0) if len(body.get("token_ids", "  ")) > 1 else 0)  # not what opens the engine
        if control("fail", None) == path:
            return self.answer({"error": "told to fail"}, 500)
        status, content = self.handle_one(path, body)
        return self.answer(content, status)

    def handle_one(self, path, body):
        if path == "/inference/v1/generate":
            SERVER.going.wait(30)
            if body["model"] != "policy" and body["model"] not in SERVER.adapters:
                return 404, {"error": {"message": f"no model {body['model']}"}}
            weights = SERVER.adapters.get(body["model"], SERVER.weights)
            spans = [{"version": SERVER.version, "start": 0, "end": 1}]
            entry = {"logprob": -1.0, "token_id": weights}
            choice = {"token_ids": [weights], "logprobs": {"content": [entry]}, "finish_reason": "length"}
            return 200, {"choices": [{**choice, "weight_versions": spans}]}
        if path == "/pause":
            SERVER.going.clear()
        elif path == "/resume":
            SERVER.going.set()
        elif path == "/start_weight_update":
            if SERVER.started:
                return 500, {"error": "already active"}
            SERVER.started = True
        elif path == "/update_weights":
            SERVER.weights = read(body["update_info"]["folder"])
        elif path == "/finish_weight_update":
            SERVER.started, SERVER.version = False, body["weight_version"]
        elif path == "/update_weight_version":
            SERVER.version = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            if body["lora_name"] in SERVER.adapters:
                return 400, {"error": "has already been loaded"}
            SERVER.adapters[body["lora_name"]] = read(body["lora_path"])
        elif path == "/v1/unload_lora_adapter" and SERVER.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": "no such adapter"}
        return 200, {}


if __name__ == "__main__":
    time.sleep(control("delay", 0))
    print("api key:", os.environ.get("VLLM_API_KEY"), flush=True)
    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
