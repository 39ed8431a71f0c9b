"""`stepgym train` on several processes: the run of one process, said once, and gone on with by another number."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgym.train.parallel.processes import Processes

GAMES = Path(__file__).parents[2] / "games"
EPISODES = {("expert", 0): 16, ("validation", 2): 4, ("validation", 4): 4, ("test", 0): 6}
EPISODES |= {("train", iteration): 16 for iteration in (1, 2, 3, 4)}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    from coin import RECIPE

    path = tmp_path / "coin.yaml"
    kl = {"kl": {"kind": "k3", "coef": 0.01}, **RECIPE["algorithm"]}
    path.write_text(json.dumps({**RECIPE, "algorithm": kl, "checkpoint": {"every": 1, "keep": 9}}))
    return path


def command(processes: Processes, arguments: list[str], kill_at: str = "", games: str = "") -> list[Any]:
    """The command line on every rank; rank 0 dies when a checkpoint of that name is there."""
    from stepgym.cli.main import run

    sys.path.insert(0, games)
    out = Path(arguments[arguments.index("--out") + 1])

    def watch() -> None:
        while not list(out.glob(f"checkpoints/{kill_at}")):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    if kill_at and processes.is_lead:
        threading.Thread(target=watch, daemon=True).start()
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        code = run(arguments)
    return [code, said.getvalue(), told.getvalue()]


def weights(out: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    summary = json.loads((out / "summary.json").read_text())
    saved = load_file(Path(summary["model"]) / "model.safetensors")
    return torch.cat([saved[name].flatten() for name in sorted(saved)])


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_same(out: Path, alone: Path) -> None:
    from stepgym.record.store import TrajectoryStore

    assert (weights(out) - weights(alone)).norm() / weights(alone).norm() < 1e-4
    for ours, theirs in zip(rows(out), rows(alone), strict=True):
        assert ours["iteration"] == theirs["iteration"]
        for name in {"reward_mean", "grad_norm", "loss", "kl", "entropy", "update", "tokens_trained"} & set(theirs):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-2, abs=1e-5), (ours["iteration"], name)
    with TrajectoryStore(out / "trajectories") as store:
        found = Counter((key.phase, key.iteration) for key in store.ids(final_only=True))
    best = json.loads((out / "summary.json").read_text())["best_iteration"]
    assert found == {**EPISODES, ("test", best): 6}


def play_alone(recipe: Path, out: Path) -> None:
    code, said, told = command(Processes.start("cpu", {}), ["train", str(recipe), "--out", str(out)], games=str(GAMES))
    assert code == 0, told
    assert "success" in said


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_any_number_of_processes(
    all_answers: Callable[..., list[dict[str, Any]]], tmp_path: Path, recipe: Path
) -> None:
    alone, out = tmp_path / "alone", tmp_path / "out"
    play_alone(recipe, alone)
    arguments = ["train", str(recipe), "--out", str(out)]
    for size, kill_at in ((2, "update-00000000"), (3, "update-00000002"), (1, "update-00000003")):
        answers = all_answers(command, size=size, arguments=arguments, kill_at=kill_at, games=GAMES)
        assert answers[0]["error"] == "the process died or hung"
        for other in answers[1:]:  # it sees the connection break, and does not wait for ever
            assert other["result"][0] == 3, other
            assert other["result"][2].endswith(
                "error: another process of this run ended; what it said last tells why\n"
            )
    answers = all_answers(command, arguments=arguments, games=GAMES)
    (code, said, told), follower = (answer["result"] for answer in answers)
    assert code == 0, told
    assert "going on after iteration" in told
    assert "success" in said
    assert follower == [0, "", ""]
    check_same(out, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["overlap.kind=one_step_off", "algorithm.correction=truncated"],
        ["overlap.kind=async", "algorithm.correction=truncated"],
        ["algorithm.credit=gae", "algorithm.critic.clip=0.3"],
        ["policy.lora.rank=4", "policy.gradient_checkpointing=true"],
        ["policy.autocast=bfloat16", "refill.rounds=1", "env.kind=coin:LazyCoin"],
    ],
)
def test_everything_else_works_on_two_processes(
    all_answers: Callable[..., list[dict[str, Any]]], tmp_path: Path, recipe: Path, changes: list[str]
) -> None:
    arguments = ["train", str(recipe), *changes, "--out", str(tmp_path / "out")]
    (code, _, told), follower = (answer["result"] for answer in all_answers(command, arguments=arguments, games=GAMES))
    assert code == 0, told
    assert follower == [0, "", ""]
    assert [row["iteration"] for row in rows(tmp_path / "out")] == [0, 1, 2, 3, 4]


def test_what_is_wrong_is_said_once(all_answers: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for change, line in [
        ("algorithm.credit=grqo", "error: algorithm: unknown credit 'grqo'; did you mean 'grpo'?"),
        ("env.kind=nowhere:Env", "error: "),
    ]:
        recipe = tmp_path / "bad.yaml"
        recipe.write_text(json.dumps({"env": {"kind": "guess:Guess"}, "model": {"kind": "tiny"}}))
        answers = all_answers(command, arguments=["train", str(recipe), change, "--out", str(out)], games=GAMES)
        (code, said, told), follower = (answer["result"] for answer in answers)
        assert (code, said) == (2, "")
        assert told.startswith(line), told
        assert told.count("\n") == 1
        assert follower == [2, "", ""]
    out.write_text("a file")
    good = tmp_path / "good.yaml"
    good.write_text(json.dumps({"env": {"kind": "coin:Coin"}, "model": {"kind": "tiny"}}))
    answers = all_answers(command, arguments=["train", str(good), "--out", str(out)], games=GAMES)
    (code, _, told), follower = (answer["result"] for answer in answers)
    assert (code, told) == (2, f"error: {out}: a run is a folder, this is a file; give another --out\n")
    assert follower == [2, "", ""]


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(tmp_path: Path, recipe: Path) -> None:
    alone, out = tmp_path / "alone", tmp_path / "out"
    play_alone(recipe, alone)
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(GAMES)}
    done = subprocess.run(
        [*program, "-m", "stepgym.cli.main", "train", str(recipe), "--out", str(out), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations"] == 4
    assert done.stderr.count("run: ") == done.stderr.count("iteration    4") == 1
    check_same(out, alone)
