"""A real OpenAI-compatible server around a tiny model, answering as vLLM does, for tests of all that speaks HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from stepgym.errors import ContextOverflow, StepgymError
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.record.step import Sampling

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def error(status: int, message: str, **fields: Any) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status, **fields}}, status)


def make_app(
    engine: TransformersEngine, *, name: str, api_key: str | None = None, token_ids: bool = True, tells: bool = True
) -> FastAPI:
    """The application.

    Args:
        engine: What answers.
        name: The model's name.
        api_key: The key that every request must bring, if any.
        token_ids: Whether token ids are given when they are asked for.
        tells: Whether chat answers say what stopped them (`stop_reason`).
    """
    app = FastAPI()
    app.state.requests = []

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Any:
        if api_key is not None and request.headers.get("authorization") != f"Bearer {api_key}":
            return error(401, "the key is wrong")
        return await call_next(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": engine.context_length}]}

    async def generate(body: dict[str, Any], prompt: Any) -> tuple[Any, str, object]:
        """The completion, its text without what a stop string cuts off, and what stopped it."""
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        settings = {key: body[key] for key in SETTINGS if body.get(key) is not None}
        completion = await engine.generate(
            np.array(prompt, dtype=np.int32),
            Sampling(**settings),
            max_tokens=body.get("max_tokens") or 16,
            stop=stop,
            stop_token_ids=body.get("stop_token_ids") or [],
            seed=body.get("seed"),
        )
        ids = completion.response_ids.tolist()
        hidden = body.get("skip_special_tokens", True)
        text = engine.tokenizer.decode(ids, skip_special_tokens=hidden)
        found = [(text.index(s), s) for s in stop if s in text]
        reason: object = None
        if found and completion.finish_reason == "stop":
            at, reason = min(found)
            text = text[: at + (len(str(reason)) if body.get("include_stop_str_in_output") else 0)]
        return completion, text, reason

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        app.state.requests.append(body)
        if body["model"] != name:
            return error(404, f"The model `{body['model']}` does not exist.")
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = engine.tokenizer.encode(prompt)
        try:
            completion, text, reason = await generate(body, prompt)
        except ContextOverflow:
            return error(400, "This model's maximum context length is exceeded.", param="input_tokens")
        except StepgymError as failure:
            return error(400, str(failure))
        ids = completion.response_ids.tolist()
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "finish_reason": completion.finish_reason,
            "stop_reason": reason,
            "logprobs": None,
        }
        if body.get("logprobs") is not None:
            tokens = [engine.tokenizer.decode([i]) for i in ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": completion.logprobs.tolist()}
        if token_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": list(prompt)}
        return {"id": "1", "object": "text_completion", "created": 0, "model": name, "choices": [choice]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        app.state.requests.append(body)
        if body["model"] != name:
            return error(404, f"The model `{body['model']}` does not exist.")
        prompt = engine.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        try:
            completion, text, reason = await generate(body, prompt)
        except ContextOverflow:
            return error(400, "This model's maximum context length is exceeded.", param="input_tokens")
        except StepgymError as failure:
            return error(400, str(failure))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body.get("tools") and (calls := [parsed(found) for found in CALL.findall(text)]):
            message = {"role": "assistant", "content": CALL.sub("", text).strip() or None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": completion.finish_reason}
        if message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        if tells:
            choice["stop_reason"] = reason
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(completion.response_ids)}
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": name,
            "choices": [choice],
            "usage": usage,
        }

    return app


def parsed(text: str) -> dict[str, Any]:
    call = json.loads(text)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"call_{abs(hash(text))}", "type": "function", "function": function}


@dataclass
class RunningServer:
    """A server in a thread of this process.

    Attributes:
        url: Address of its `/v1`.
        name: The model's name.
        folder: Folder of the model and its tokenizer.
        engine: The engine behind it.
        requests: The bodies of the POST requests so far.
    """

    url: str
    name: str
    folder: str
    engine: TransformersEngine
    requests: list[dict[str, Any]]
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def serve(engine: TransformersEngine, folder: str, **options: Any) -> RunningServer:
    """Start a server on a free port of the loopback interface."""
    app = make_app(engine, **options)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the test server did not start")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    return RunningServer(url, options["name"], folder, engine, app.state.requests, server, thread)
