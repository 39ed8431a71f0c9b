"""The trainer's step on one large GPU, against the same step written with plain transformers and padded batches.

- `plain`: what a rectangular trainer does with a model of transformers. Each step is a row: prompts filled up on the
  left to the longest of the batch, responses on the right. FlashAttention if it is installed, else torch's own; the
  model's head on the positions of responses, log-softmax in float32.
- `merged`, `tree`: the trainer, with `policy.layout` so. FlexAttention, compiled layers, log-probabilities without
  logits (Liger-Kernel's where it is installed).

Models have the shapes of Qwen2.5 and random weights, in bfloat16 (`--dtype float32` keeps weights and gradients in
float32 and computes in bfloat16). Workloads are those of `workloads.py`. A step is credit, packing, forward and
backward passes over one batch; no optimizer step. Median of `--repeats` after a warm-up. What does not fit into memory
is tried again with gradient checkpointing, then with smaller micro-batches; the table says what it took.

Utilisation = (6 * parameters * unique tokens + attention over visible pairs + head over trained rows) / time / dense
bfloat16 peak. Parameters are those of the layers; unique tokens, pairs and rows are those of the whole batch in one
tree, so that recomputation, padding and cut prefixes count as time and not as work, for every way alike.

Run it with `python benchmarks/train_gpu.py [--json FILE]`. It exits with 1 where the tree stays below 45% on (a) at
1.5B and up, where gradients differ, or where something fits into memory in no way. Without a GPU it runs a small form
on the CPU, which shows that the ways agree, and nothing else. Figures for the CPU are those of `train_step.py`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS

from stepgym.credit.treatment import treat
from stepgym.model.logprobs import TokenScores
from stepgym.record.outcome import OutcomePolicy
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.packs.batch import Batch
from stepgym.train.packs.forest import forests
from stepgym.train.packs.micro_batch import MicroBatch
from stepgym.train.parallel.balance import Cost
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig

WAYS = ("plain", "merged", "tree")
# layers, width, inner width, heads, heads of keys and values, vocabulary, whether input and output embedding are one
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (2, 64, 192, 4, 2, 4096, True),
    "0.5B": (24, 896, 4864, 14, 2, 151_936, True),
    "1.5B": (28, 1536, 8960, 12, 2, 151_936, True),
    "3B": (36, 2048, 11008, 16, 2, 151_936, True),
    "7B": (28, 3584, 18944, 28, 4, 152_064, False),
}
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second, by a part of the device's name."""
WANTED, WANTED_OF = 0.45, ("1.5B", "3B", "7B")


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows(MicroBatch):
    """Prompts that end, and responses that begin, at the same place.

    Attributes:
        mask: int64 tensor [B, L], 1 where there is a token.
        keep: Number of columns, from the last on, that logits are needed of.
    """

    mask: torch.Tensor | None = None
    keep: int = 0


class PlainPolicy(Policy):
    """The model as others call it."""

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Rows in the order of the batch, all of the same width."""
        prompts = [int(path.position[0]) for path in batch.paths]
        responses = [len(path.ids) + 1 - prompt for path, prompt in zip(batch.paths, prompts, strict=True)]
        left, right = max(prompts), max(responses)
        width = left + right
        many = max(1, self.config.micro_batch_tokens // width)
        found: list[MicroBatch] = []
        for start in range(0, len(prompts), many):
            chosen = batch.paths[start : start + many]
            ids, mask = torch.zeros((2, len(chosen), width), dtype=torch.int64).unbind()
            places = []
            for row, path in enumerate(chosen):
                first = left - prompts[start + row]
                ids[row, first : first + len(path.ids)] = torch.from_numpy(path.ids.astype("int64"))
                mask[row, first : first + len(path.ids)] = 1
                places.append(torch.from_numpy(row * width + first + path.position - 1))
            found.append(
                PaddedRows(
                    ids=ids,
                    position=(mask.cumsum(1) - 1).clamp_(min=0),
                    tree=None,
                    place=torch.cat(places),
                    target=torch.cat([torch.from_numpy(path.target.astype("int64")) for path in chosen]),
                    temperature=None,
                    token=torch.cat([torch.arange(p.token, p.token + len(p.position)) for p in chosen]),
                    mask=mask,
                    keep=right + 1,
                )
            )
        return found

    def score(self, micro_batch: MicroBatch, *, entropy: bool = False, greedy: bool = False) -> TokenScores:
        """Logits where responses are, then log-softmax."""
        assert isinstance(micro_batch, PaddedRows)
        assert micro_batch.mask is not None
        assert micro_batch.position is not None
        width, keep = micro_batch.ids.shape[1], micro_batch.keep
        with self._computing():
            logits = self.model(
                input_ids=micro_batch.ids.to(self.device),
                attention_mask=micro_batch.mask.to(self.device),
                position_ids=micro_batch.position.to(self.device),
                logits_to_keep=keep,
                use_cache=False,
            ).logits
        place = micro_batch.place.to(self.device)
        rows = logits[place // width, place % width - (width - keep)]
        table = torch.log_softmax(rows.float() if rows.dtype == torch.bfloat16 else rows, -1)
        return TokenScores(table.gather(1, micro_batch.target.to(self.device)[:, None]).squeeze(1))


def plain_attention() -> str:
    """The fastest attention that plain transformers has here."""
    installed = importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if installed and torch.cuda.is_available() else "sdpa"


class Bench:
    """Measures steps.

    Attributes:
        device: Where.
        peak: Dense operations per second of the device, or None.
        small: Whether it is the form for the CPU.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.small: bool = options.small
        self.device = torch.device("cpu" if self.small else "cuda")
        name = platform.machine() if self.small else torch.cuda.get_device_name()
        self.device_name = name
        known = [peak for part, peak in PEAKS.items() if part in name]
        self.peak: float | None = options.peak or (known[0] if known and not self.small else None)

    def measure(self, shape: str, way: str, workload: str) -> dict[str, Any]:
        """One way on one workload, with what it takes to fit into memory."""
        budget = self.options.budget
        attempts = [(budget, False), (budget, True), (budget // 2, True), (budget // 4, True)]
        for tokens, checkpointing in attempts:
            try:
                return self._measure(shape, way, workload, tokens, checkpointing)
            except torch.OutOfMemoryError:
                pass  # what it held is let go of below, once the error is no longer at hand
            except Exception as error:  # the other measurements are still worth having
                traceback.print_exc()
                return {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
            gc.collect()
            torch.cuda.empty_cache()
        return {"failed": f"out of memory with micro-batches of {attempts[-1][0]} tokens and gradient checkpointing"}

    def _measure(self, shape: str, way: str, workload: str, budget: int, checkpointing: bool) -> dict[str, Any]:
        policy = self._policy(shape, way, budget, checkpointing)
        groups, _ = treat((t for group in WORKLOADS[workload](self.options.scale) for t in group), OutcomePolicy())
        learner = Learner(policy, LearnerConfig(entropy=False))

        def step() -> tuple[Any, Any]:
            policy.model.zero_grad()
            with policy.training():
                (mini,), _ = learner.prepare(groups)
                return mini, learner.backward(mini)

        first, _ = self._timed(step)  # with all that is compiled
        if way != "plain":
            self._timed(step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed = [self._timed(step) for _ in range(self.options.repeats)]
        times, (mini, metrics) = [seconds for seconds, _ in timed], timed[-1][1]
        if self.options.profile and way != "plain":
            self._profile(step, f"{shape} {way} {workload}")
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        (whole,) = forests(mini.batch, "tree", 10**12)
        work = 3 * Cost.of_model(policy.model).of(whole)
        taken = statistics.median(times)
        norm = torch.nn.utils.get_total_norm([p.grad for p in policy.model.parameters() if p.grad is not None])
        return {
            "seconds": {"median": taken, "min": min(times), "max": max(times), "first": first},
            "utilisation": None if self.peak is None else work / taken / self.peak,
            "operations": work,
            "tokens": sum(micro.tokens for micro in mini.micro_batches),
            "unique_tokens": whole.tokens,
            "step_tokens": sum(len(path.ids) for path in mini.batch.paths),
            "trained": len(mini),
            "unique_tokens_per_s": whole.tokens / taken,
            "step_tokens_per_s": sum(len(path.ids) for path in mini.batch.paths) / taken,
            "peak_memory_gb": memory,
            "micro_batches": len(mini.micro_batches),
            "budget": budget,
            "gradient_checkpointing": checkpointing,
            "loss": metrics.means()["loss"],
            "gradient_norm": float(norm),
        }

    def _policy(self, shape: str, way: str, budget: int, checkpointing: bool) -> Policy:
        layers, width, inner, heads, groups, vocabulary, tied = SHAPES[shape]
        config = transformers.Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=tied,
        )
        dtype = "float32" if self.small else self.options.dtype
        torch.manual_seed(0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        held = PolicyConfig(
            device=self.device.type,
            dtype=dtype,
            layout="steps" if way == "plain" else way,
            micro_batch_tokens=budget,
            gradient_checkpointing=checkpointing,
            compile="none" if way == "plain" else self.options.compile,
        )
        if way != "plain":
            return Policy(model, held)
        policy = PlainPolicy(model, held)
        model.set_attn_implementation(plain_attention())
        return policy

    def _timed(self, step: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        started = time.perf_counter()
        result = step()
        self._wait()
        return time.perf_counter() - started, result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _profile(self, step: Callable[[], Any], title: str) -> None:
        with torch.profiler.profile() as profile:
            self._timed(step)
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        print(title, profile.key_averages().table(sort_by=order, row_limit=30), sep="\n", file=sys.stderr)


def failures(results: dict[str, dict[str, dict[str, Any]]], tolerance: float, judged: bool) -> list[str]:
    """What the results do not show and should."""
    found = []
    for shape, workloads in results.items():
        for workload, ways in workloads.items():
            whole = {way: row for way, row in ways.items() if "failed" not in row}
            found += [f"{shape}, {workload}, {way}: {row['failed']}" for way, row in ways.items() if "failed" in row]
            tree = whole.get("tree")
            if tree is None:
                continue
            for way, row in whole.items():
                if abs(row["gradient_norm"] / tree["gradient_norm"] - 1) > tolerance:
                    norms = f"{tree['gradient_norm']} and {row['gradient_norm']}"
                    found.append(f"{shape}, {workload}: gradient norms of tree and {way} differ: {norms}")
            used = tree["utilisation"]
            if judged and workload == "a" and shape in WANTED_OF and used is not None and used < WANTED:
                found.append(f"{shape}, a: the tree's utilisation is {used:.1%}, and {WANTED:.0%} is wanted")
    return found


def table(results: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """One line for each measurement."""
    made = Table(
        "model", "workload", "way", "tokens", "passes", "s (min-max)", "faster", "utilisation", "unique tok/s",
        "memory, GB", "checkpoints",
    )  # fmt: skip
    for shape, workloads in results.items():
        for workload, ways in workloads.items():
            plain = ways.get("plain", {}).get("seconds", {}).get("median")
            for way, row in ways.items():
                if "failed" in row:
                    made.add_row(shape, workload, way, row["failed"])
                    continue
                seconds = row["seconds"]
                made.add_row(
                    shape,
                    workload,
                    way,
                    f"{row['tokens']:,}",
                    str(row["micro_batches"]),
                    f"{seconds['median']:.3f} ({seconds['min']:.3f}-{seconds['max']:.3f})",
                    "" if plain is None else f"{plain / seconds['median']:.2f}",
                    "" if row["utilisation"] is None else f"{row['utilisation']:.1%}",
                    f"{row['unique_tokens_per_s']:,.0f}",
                    "" if row["peak_memory_gb"] is None else f"{row['peak_memory_gb']:.1f}",
                    "yes" if row["gradient_checkpointing"] else "no",
                )
    return made


def hardware(device_name: str) -> dict[str, Any]:
    """What the figures were measured on."""
    kernels = {name: importlib.util.find_spec(name) is not None for name in ("flash_attn", "liger_kernel", "cutlass")}
    return {
        "device": device_name,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "kernels": kernels,
        "plain_attention": plain_attention(),
    }


def read(arguments: list[str] | None) -> argparse.Namespace:
    """The options, and what they mean for the machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, help="default: all that Qwen2.5 has up to 7B")
    parser.add_argument("--workloads", nargs="+", default=["a", "b", "c", "d"], choices=["a", "b", "c", "d"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--scale", type=float, help="all lengths times this; default: 1, small form: 0.05")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch; default: 16384, small form: 1024")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of weights and gradients")
    parser.add_argument("--compile", default="auto", choices=["auto", "none", "layers"], help="policy.compile")
    parser.add_argument("--peak", type=float, help="dense bfloat16 operations per second; default: by device name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the costliest kernels of each step")
    parser.add_argument("--small", action="store_true", help="a small form on the CPU; what is done without CUDA")
    parser.add_argument("--json", type=Path, help="write the result to this file as well, after each measurement")
    options = parser.parse_args(arguments)
    options.small = options.small or not torch.cuda.is_available()
    options.models = options.models or (["tiny"] if options.small else ["0.5B", "1.5B", "3B", "7B"])
    options.scale = options.scale or (0.05 if options.small else 1.0)
    options.budget = options.budget or (1024 if options.small else 16384)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = read(arguments)
    if options.small:
        torch.set_num_threads(1)
    bench = Bench(options)
    progress = Console(stderr=True, highlight=False)
    result: dict[str, Any] = {
        "benchmark": "train_gpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(bench.device_name),
        "dtype": "float32" if options.small else options.dtype,
        "scale": options.scale,
        "repeats": options.repeats,
        "peak_operations_per_s": bench.peak,
        "optimizer_step": False,
    }
    results: dict[str, dict[str, dict[str, Any]]] = {}
    tolerance = 1e-4 if options.small else 0.05
    for shape in options.models:
        torch._dynamo.reset()  # what was compiled for another width would be taken for one of many widths
        for workload in options.workloads:
            for way in options.ways:
                row = bench.measure(shape, way, workload)
                results.setdefault(shape, {}).setdefault(workload, {})[way] = row
                gc.collect()
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()
                progress.print(f"{shape} {workload} {way}: {row.get('failed') or row['seconds']}")
                missed = failures(results, tolerance, judged=options.scale == 1.0)
                result |= {"missed": missed, "models": results}
                if options.json:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    console = console if console.width >= 140 else Console(width=140)
    console.print(table(results))
    for line in result["missed"]:
        console.print(f"[red]missed[/red] {line}")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
