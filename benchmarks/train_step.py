"""The trainer's step on the same trajectories in four ways: padded, packed, merged, tree.

- `padded`: each step is a row, as rectangular trainers have it: prompts filled up to the longest prompt of the batch,
  responses to the longest response.
- `packed`: each step by itself, without padding.
- `merged`: the steps of a trajectory that extend one another are one sequence, without padding.
- `tree`: every token that any two steps share is computed once.

All four go through the same learner: credit, layout, log-probabilities (the head only where a trained token is
predicted), PPO's loss, gradient; no optimizer step. Workloads are those of `workloads.py`. Each measurement is a
process of its own with one thread: CPU seconds, and the process's peak memory less what it was before the step. Runs of
the four are interleaved; the median of `--repeats` is shown. Losses and gradient norms must agree.

Run it with `python benchmarks/train_step.py [--json FILE]`. It exits with 1 where the tree gains less than it must
against padded (a 5x, b 3.3x, c 4.5x) or merged (b 1.9x, c 4.4x), is anywhere over 5% slower than another way, or the
gradients differ. On a GPU there is `train_gpu.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WAYS = ("padded", "packed", "merged", "tree")
LAYOUTS = {"padded": "steps", "packed": "steps", "merged": "merged", "tree": "tree"}
SHAPES = {"small": (4, 256, 4, 768), "medium": (8, 512, 8, 1536)}
LEAST = {("a", "padded"): 5.0, ("b", "padded"): 3.3, ("c", "padded"): 4.5, ("b", "merged"): 1.9, ("c", "merged"): 4.4}
SLOWER = 1.05


# ---- in a process of its own ----------------------------------------------------------------------------------------


def measure(workload: str, way: str, shape: str, scale: float, budget: int) -> dict[str, float]:
    """One step, in this process."""
    import torch
    import transformers
    from workloads import VOCABULARY, WORKLOADS

    from stepgym.credit.treatment import treat
    from stepgym.record.outcome import OutcomePolicy
    from stepgym.train.config import LearnerConfig
    from stepgym.train.learner import Learner
    from stepgym.train.packs.batch import Batch
    from stepgym.train.packs.micro_batch import MicroBatch
    from stepgym.train.policy import Policy
    from stepgym.train.policy_config import PolicyConfig

    class PaddedPolicy(Policy):
        """Rows as wide as the longest prompt and the longest response of the batch together."""

        def micro_batches(self, batch: Batch) -> list[MicroBatch]:
            prompts = [int(path.position[0]) for path in batch.paths]
            width = max(prompts) + max(len(p.ids) + 1 - n for p, n in zip(batch.paths, prompts, strict=True))
            many = max(1, budget // width)
            found = []
            for start in range(0, len(batch.paths), many):
                chosen = batch.paths[start : start + many]
                ids = torch.zeros((len(chosen), width), dtype=torch.int64)
                for row, path in enumerate(chosen):
                    ids[row, : len(path.ids)] = torch.from_numpy(path.ids.astype("int64"))
                places = [torch.from_numpy(row * width + p.position - 1) for row, p in enumerate(chosen)]
                targets = [torch.from_numpy(p.target.astype("int64")) for p in chosen]
                tokens = [torch.arange(p.token, p.token + len(p.position)) for p in chosen]
                found.append(
                    MicroBatch(ids, None, None, torch.cat(places), torch.cat(targets), None, torch.cat(tokens))
                )
            return found

    torch.set_num_threads(1)
    layers, width, heads, inner = SHAPES[shape]
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=8192,
    )
    model = transformers.Qwen3ForCausalLM(config)
    cls = PaddedPolicy if way == "padded" else Policy
    policy = cls(model, PolicyConfig(device="cpu", layout=LAYOUTS[way], micro_batch_tokens=budget))  # type: ignore[arg-type]
    groups, _ = treat((t for group in WORKLOADS[workload](scale) for t in group), OutcomePolicy())
    learner = Learner(policy, LearnerConfig(entropy=False))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    (mini,), _ = learner.prepare(groups)
    metrics = learner.backward(mini)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "memory_mb": (after - before) / 1024,
        "tokens": sum(micro.tokens for micro in mini.micro_batches),
        "micro_batches": len(mini.micro_batches),
        "visible_pairs": sum(micro.visible_pairs for micro in mini.micro_batches),
        "trained": len(mini),
        "loss": metrics.means()["loss"],
        "gradient_norm": float(norm),
    }


# ---- all of it ------------------------------------------------------------------------------------------------------


def run(workload: str, way: str, options: argparse.Namespace) -> dict[str, float]:
    """One step, in a process of its own."""
    command = [sys.executable, __file__, "--one", workload, way]
    command += ["--shape", options.shape, "--scale", str(options.scale), "--budget", str(options.budget)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{workload}, {way}: the process failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The median of what varies, and what does not."""
    found: dict[str, Any] = dict(rows[0])
    for name in ("cpu_s", "wall_s", "memory_mb"):
        values = [row[name] for row in rows]
        found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def failures(results: dict[str, dict[str, Any]], scaled: bool) -> list[str]:
    """What the results do not show and should."""
    found = []
    for workload, ways in results.items():
        if "tree" not in ways:
            continue
        tree = ways["tree"]
        for way, row in ways.items():
            ratio = row["cpu_s"]["median"] / tree["cpu_s"]["median"]
            least = LEAST.get((workload, way), 1 / SLOWER)
            if ratio < least and not scaled:
                found.append(f"{workload}: the tree is {ratio:.2f} times as fast as {way}, and {least:.2f} is wanted")
            for name in ("loss", "gradient_norm"):
                if abs(row[name] - tree[name]) > 1e-4 * max(abs(row[name]), 1e-3):
                    found.append(f"{workload}: {name} of tree and {way} differ: {tree[name]} and {row[name]}")
    return found


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["a", "b", "c", "d"], choices=["a", "b", "c", "d"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--shape", default="small", choices=SHAPES, help="of the model: layers, width, ...")
    parser.add_argument("--scale", type=float, default=1.0, help="all lengths times this")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.shape, options.scale, options.budget)))
        return 0
    machine = hardware()
    raw: dict[str, dict[str, list[dict[str, float]]]] = {
        w: {way: [] for way in options.ways} for w in options.workloads
    }
    progress = Console(stderr=True, highlight=False)
    for repeat in range(options.repeats):
        for workload in options.workloads:
            for way in options.ways:
                raw[workload][way].append(run(workload, way, options))
                took = raw[workload][way][-1]["cpu_s"]
                progress.print(f"{repeat + 1} of {options.repeats}: {workload} {way} {took:.2f} s")
    results = {w: {way: summary(rows) for way, rows in ways.items()} for w, ways in raw.items()}
    table = Table(
        "workload", "way", "tokens", "packs", "pairs, M", "CPU s (min-max)", "memory, MB", "tree is faster by"
    )
    for workload, ways in results.items():
        for way, row in ways.items():
            seconds = row["cpu_s"]
            ratio = seconds["median"] / ways["tree"]["cpu_s"]["median"] if "tree" in ways else float("nan")
            table.add_row(
                workload,
                way,
                f"{row['tokens']:,}",
                f"{row['micro_batches']}",
                f"{row['visible_pairs'] / 1e6:.1f}",
                f"{seconds['median']:.2f} ({seconds['min']:.2f}-{seconds['max']:.2f})",
                f"{row['memory_mb']['median']:,.0f}",
                f"{ratio:.2f}",
            )
    console = Console()
    console = console if console.width >= 120 else Console(width=120)
    console.print(table)
    missed = failures(results, scaled=options.scale != 1.0 or options.shape != "small")
    for line in missed:
        console.print(f"[red]missed[/red] {line}")
    result = {
        "benchmark": "train_step",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": machine,
        "shape": options.shape,
        "scale": options.scale,
        "budget": options.budget,
        "repeats": options.repeats,
        "missed": missed,
        "workloads": results,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
