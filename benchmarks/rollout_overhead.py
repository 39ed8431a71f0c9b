"""What the agent loop itself costs per step, with an engine that answers at once.

512 episodes of 8 turns; a turn samples 300 tokens and observes 200, under a byte-level BPE tokenizer with ChatML that
is trained on the standard library's source text. It plays them through `rollout` with and without a store, with
sync hooks in the environment and with async ones, and with 4 to 32 turns to show that the cost is linear in turns.
The floor is what tokenising the observations and decoding the responses alone costs, by the same functions.

Run it with `python benchmarks/rollout_overhead.py [--json FILE]`. It exits with 1 when 8 turns with a store and an
async environment take longer than `--limit` seconds, or when a step among 32 turns costs more than `--growth` times a
step among 8.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.table import Table

from stepgym import Env, Message, Task, TrajectoryStore, rollout
from stepgym.env.messages import user
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import CHAT_TEMPLATE
from stepgym.record.step import Ids, Sampling
from stepgym.run.rollouts import RolloutConfig

# How GPT-4's and Qwen's tokenizers cut text before merging.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VARIANTS = 64  # different responses and observations


def source_text(megabytes: float) -> str:
    """Source text of the standard library, always the same files of one Python version."""
    size, texts = int(megabytes * 2**20), []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        size -= len(texts[-1])
        if size < 0:
            break
    return "".join(texts)


def build_tokenizer(text: str, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of realistic size with ChatML."""
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    bpe.add_special_tokens([AddedToken(special, normalized=False, special=True) for special in specials])
    hf: Any = transformers  # its constructors carry no types
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


class InstantEngine(Engine):
    """Answers at once with one of some prepared responses, by the seed of the request."""

    kind: ClassVar[str] = "instant"
    model = "instant"

    def __init__(self, tokenizer: Any, responses: Sequence[Ids]) -> None:
        self._tokenizer = tokenizer
        self._responses = responses
        rng = np.random.default_rng(0)
        self._logprobs = [-rng.exponential(size=len(ids)).astype(np.float32) for ids in responses]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the responses were made with."""
        return self._tokenizer

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
        """One of the prepared responses."""
        chosen = (seed or 0) % len(self._responses)
        ids = self._responses[chosen]
        return Completion(ids, self._logprobs[chosen], "stop", weights_versions=(("0", 0, len(ids)),))


class SyncEnv(Env):
    """Shows prepared observations for a fixed number of turns."""

    observations: ClassVar[Sequence[str]] = ()

    def __init__(self, *, turns: int = 8) -> None:
        self.max_turns = turns + 1

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        return [Task("0")]

    def begin(self, task: Task) -> list[Message]:
        """The first observation."""
        self._at = int(task.id)
        self._left = self.max_turns - 1
        return [user(self._next())]

    def act(self, message: Message) -> Any:
        """The next observation; the reward after the last turn."""
        self._left -= 1
        if self._left == 0:
            return [], 1.0, True, False, {}
        return [user(self._next())], 0.0, False, False, {}

    def _next(self) -> str:
        self._at += 1
        return self.observations[self._at % len(self.observations)]


class AsyncEnv(SyncEnv):
    """The same with coroutine functions as hooks."""

    async def begin(self, task: Task) -> list[Message]:
        """See `SyncEnv`."""
        return super().begin(task)

    async def act(self, message: Message) -> Any:
        """See `SyncEnv`."""
        return super().act(message)


class Workload:
    """Tokenizer, responses and observations of the sizes asked for."""

    def __init__(self, *, vocab_size: int, generated: int, observed: int, megabytes: float) -> None:
        text = source_text(megabytes)
        self.tokenizer = build_tokenizer(text, vocab_size)
        self.renderer = Renderer(self.tokenizer)
        rng = random.Random(0)
        lines = text.splitlines(keepends=True)
        frame = len(self.renderer.encode("\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
        self.responses = [
            np.append(self._ids(lines, rng, generated - 1), self.renderer.terminator_id).astype(np.int32)
            for _ in range(_VARIANTS)
        ]
        self.observations = [self.renderer.decode(self._ids(lines, rng, observed - frame)) for _ in range(_VARIANTS)]
        SyncEnv.observations = self.observations

    def _ids(self, lines: Sequence[str], rng: random.Random, size: int) -> Ids:
        """Ids of consecutive lines from anywhere in the text."""
        start = rng.randrange(len(lines) - size)
        return self.renderer.encode("".join(lines[start : start + size]))[:size]

    def play(self, env: type[SyncEnv], episodes: int, turns: int, store: TrajectoryStore | None) -> dict[str, float]:
        """Play and count."""
        tasks = [Task(str(number)) for number in range(episodes)]
        trajectories = rollout(
            env,
            tasks,
            InstantEngine(self.tokenizer, self.responses),
            env_config={"turns": turns},
            renderer=self.renderer,
            config=RolloutConfig(concurrency=64),
            store=store,
        )
        last = [trajectory.steps[-1] for trajectory in trajectories]
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        if len(steps) != episodes * turns or any(trajectory.reward != 1.0 for trajectory in trajectories):
            raise RuntimeError("the episodes did not go as planned")
        if any(step.rendering not in ("first", "extended") for step in steps):
            raise RuntimeError("a prompt was rendered anew")
        return {
            "steps": len(steps),
            "tokens_per_turn": sum(step.length for step in last) / len(steps),
            "prompt_tokens_sent": sum(step.length - 1 for step in steps),
        }

    def floor(self, steps: int) -> None:
        """Tokenise an observation and decode a response for each step, and nothing else."""
        for number in range(steps):
            self.renderer.encode(self.observations[number % _VARIANTS])
            self.renderer.decode(self.responses[number % _VARIANTS][:-1])


def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median, least and most wall seconds, and median CPU seconds of the process."""
    wall, cpu = [], []
    for _ in range(repeats):
        gc.collect()
        started, used = time.perf_counter(), time.process_time()
        work()
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - started)
    return {
        "median_s": statistics.median(wall),
        "min_s": min(wall),
        "max_s": max(wall),
        "median_cpu_s": statistics.median(cpu),
    }


def hardware() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "pyarrow": version("pyarrow"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--generated", type=int, default=300, help="sampled tokens per turn")
    parser.add_argument("--observed", type=int, default=200, help="observed tokens per turn")
    parser.add_argument("--vocabulary", type=int, default=16384, help="entries of the tokenizer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=2.5, help="most seconds for the whole rollout (median)")
    parser.add_argument(
        "--growth", type=float, default=1.5, help="most that a step may cost more at four times the turns"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    options = parser.parse_args()
    before = hardware()
    workload = Workload(
        vocab_size=options.vocabulary, generated=options.generated, observed=options.observed, megabytes=4.0
    )
    steps = options.episodes * options.turns
    rows: list[dict[str, Any]] = []

    def measure(name: str, env: type[SyncEnv], turns: int, stored: bool) -> dict[str, Any]:
        counts: dict[str, float] = {}

        def work() -> None:
            with tempfile.TemporaryDirectory() as folder:
                store = TrajectoryStore(folder, "a") if stored else None
                counts.update(workload.play(env, steps // turns, turns, store))
                if store is not None:
                    store.close()

        row = {"name": name, "turns": turns, "store": stored, **timed(work, options.repeats), **counts}
        rows.append(row)
        return row

    workload.play(AsyncEnv, 64, 2, None)  # imports, threads and caches
    floor = timed(lambda: workload.floor(steps), options.repeats)
    measure("sync environment", SyncEnv, options.turns, False)
    measure("sync environment", SyncEnv, options.turns, True)
    measure("async environment", AsyncEnv, options.turns, False)
    total = measure("async environment", AsyncEnv, options.turns, True)
    scaling = {turns: measure("by turns", AsyncEnv, turns, False) for turns in (4, 8, 16, 32)}

    per_step = {turns: 1e6 * row["median_s"] / row["steps"] for turns, row in scaling.items()}
    exponent = float(np.polyfit(np.log(list(per_step)), np.log([t * us for t, us in per_step.items()]), 1)[0])
    table = Table("rollout", "turns", "store", "steps", "wall, s", "CPU, s", "wall per step, µs")
    table.add_row(
        "floor: tokenise and decode",
        "",
        "",
        f"{steps:,}",
        f"{floor['median_s']:.2f} ({floor['min_s']:.2f}-{floor['max_s']:.2f})",
        f"{floor['median_cpu_s']:.2f}",
        f"{1e6 * floor['median_s'] / steps:.0f}",
    )
    for row in rows:
        table.add_row(
            row["name"],
            str(row["turns"]),
            "yes" if row["store"] else "no",
            f"{row['steps']:,}",
            f"{row['median_s']:.2f} ({row['min_s']:.2f}-{row['max_s']:.2f})",
            f"{row['median_cpu_s']:.2f}",
            f"{1e6 * row['median_s'] / row['steps']:.0f}",
        )
    console = Console()
    console = console if console.width >= 100 else Console(width=100)
    console.print(table)
    console.print(
        f"time of an episode grows as turns^{exponent:.2f}; {total['tokens_per_turn']:.0f} tokens per turn; "
        f"load before {before['load_average'][0]}"
    )
    result = {
        "benchmark": "rollout_overhead",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": before,
        "episodes": options.episodes,
        "turns": options.turns,
        "generated": options.generated,
        "observed": options.observed,
        "vocabulary": options.vocabulary,
        "repeats": options.repeats,
        "floor": {"steps": steps, **floor},
        "rollouts": rows,
        "us_per_step_by_turns": per_step,
        "exponent_in_turns": exponent,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    linear = per_step[32] <= options.growth * per_step[8]
    return 0 if total["median_s"] <= options.limit and linear else 1


if __name__ == "__main__":
    sys.exit(main())
