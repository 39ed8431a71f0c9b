from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgym.errors import ActionError, UserError
from stepgym.run.rollouts import RunStoppedError
from stepgym.train.parallel.processes import Processes

Ranks = Callable[..., list[Any]]


def exchange(processes: Processes) -> dict[str, Any]:
    mine = torch.tensor([1.0, 10.0]) * (processes.rank + 1)
    said: list[int] = []

    def once() -> dict[str, Any]:
        said.append(processes.rank)
        inner = processes.lead(lambda: "inner")  # nested: a plain call
        return {"pid": os.getpid(), "inner": inner}

    led = processes.lead(once)
    return {
        "led": led,
        "ran_here": said,
        "shared": processes.share(f"from {processes.rank}"),
        "gathered": processes.gather(processes.rank * 2),
        "sum": processes.sum(mine).tolist(),
        "max": processes.max(mine).tolist(),
        "mine": mine.tolist(),
        "device": str(processes.device),
        "lead": processes.is_lead,
    }


def test_what_ranks_tell_each_other(ranks: Ranks) -> None:
    zero, one, two = ranks(exchange, size=3)
    assert zero["led"] == one["led"] == two["led"]
    assert (zero["ran_here"], one["ran_here"], two["ran_here"]) == ([0], [], [])
    assert zero["led"]["inner"] == "inner"
    for number, answer in enumerate((zero, one, two)):
        assert answer["shared"] == "from 0"
        assert answer["gathered"] == [0, 2, 4]
        assert answer["sum"] == [6.0, 60.0]
        assert answer["max"] == [3.0, 30.0]
        assert answer["mine"] == [number + 1.0, 10.0 * (number + 1)]
        assert answer["device"] == "cpu"
        assert answer["lead"] is (number == 0)


def test_one_process_leaves_torch_distributed_alone() -> None:
    with Processes.start("cpu", {}) as processes:
        answer = exchange(processes)
        processes.barrier()
        assert not torch.distributed.is_initialized()
    assert (processes.rank, processes.size, processes.is_lead) == (0, 1, True)
    assert answer["led"] == {"pid": os.getpid(), "inner": "inner"}
    assert answer["sum"] == [1.0, 10.0]
    assert answer["gathered"] == [0]
    with pytest.raises(ZeroDivisionError):
        processes.lead(lambda: 1 // 0)


class StubbornError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("one and two")


def fail_here(processes: Processes, where: int) -> list[str]:
    def failing() -> int:
        if processes.rank >= where:
            raise UserError(f"no room on {processes.rank}")
        return processes.rank

    try:
        processes.together(failing)
    except UserError as error:
        answer = [str(error), getattr(error, "reported", False)]
    assert processes.together(lambda: processes.rank) == processes.rank
    return answer


def test_what_fails_on_any_rank_fails_on_all_and_rank_0_speaks_first(ranks: Ranks) -> None:
    assert ranks(fail_here, size=3, where=1) == [
        ["no room on 1", False],
        ["no room on 1", False],
        ["no room on 2", False],
    ]
    assert ranks(fail_here, where=0) == [["no room on 0", False], ["no room on 0", True]]


def fail(processes: Processes, kind: str) -> list[str]:
    def failing() -> None:
        assert processes.is_lead
        if kind == "user":
            raise UserError("recipe: no such field")
        if kind == "stopped":
            raise RunStoppedError("too many failed")
        if kind == "action":
            raise ActionError("no", status="malformed")
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "exchange":
            processes.sum(torch.ones(1))
        raise StubbornError(1, 2)

    try:
        processes.lead(failing)
    except BaseException as error:
        status, reported = getattr(error, "status", ""), getattr(error, "reported", False)
        answer = [type(error).__name__, str(error), str(getattr(error, "exit_code", "")), status]
    assert reported is not processes.is_lead
    assert processes.share(5) == 5  # an error that somebody catches ends nothing
    return answer


@pytest.mark.parametrize(
    ("kind", "lead", "others"),
    [
        ("user", ["UserError", "recipe: no such field", "2", ""], None),
        ("stopped", ["RunStoppedError", "too many failed", "3", ""], None),
        ("action", ["ActionError", "no", "1", "malformed"], None),
        ("interrupt", ["KeyboardInterrupt", "", "", ""], None),
        ("stubborn", ["StubbornError", "one and two", "", ""], ["RuntimeError", "StubbornError: one and two", "", ""]),
    ],
)
def test_an_error_of_rank_0_is_the_same_error_everywhere(
    ranks: Ranks, kind: str, lead: list[str], others: list[str] | None
) -> None:
    assert ranks(fail, kind=kind) == [lead, others or lead]


def test_ranks_cannot_exchange_anything_while_one_leads(ranks: Ranks) -> None:
    for kind, message, _, _ in ranks(fail, kind="exchange"):
        assert kind == "RuntimeError"
        assert "within Processes.lead only rank 0 is at work" in message


def test_what_is_wrong_with_the_environment_or_the_device_is_said_in_one_line() -> None:
    for environment, said in [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "a rank is from 0 to WORLD_SIZE - 1"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT is not set; start with torchrun"),
    ]:
        with pytest.raises(UserError, match=said):
            Processes.start("cpu", environment)
    with pytest.raises(UserError, match="device 'gpu' is not one"):
        Processes.start("gpu", {})
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA GPU"):
            Processes.start("cuda", {})


def under_torchrun(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A program on two ranks whose `body` has `processes`, and which exits as the command line does."""
    program = tmp_path / "program.py"
    main = f"""
        import os, sys, time
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
        from stepgym.errors import StepgymError, UserError
        from stepgym.train.parallel.processes import Processes
        folder = Path({str(tmp_path)!r})
        code = 0
        try:
            with Processes.start("cpu") as processes:
                (folder / f"started-{{processes.rank}}").touch()
    """
    end = """
        except (StepgymError, KeyboardInterrupt) as error:
            time.sleep(0.5 * processes.is_lead)  # rank 0 has files to close
            code = getattr(error, "exit_code", 130)
            reported = getattr(error, "reported", False)
        if not (code and reported):
            print(f"rank {processes.rank} ends with {code}", flush=True)
        sys.exit(code)
    """
    text = textwrap.dedent(main) + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + textwrap.dedent(end)
    program.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_under_torchrun_an_error_of_rank_0_is_reported_once_with_its_exit_code(tmp_path: Path) -> None:
    body = """
        def work():
            raise UserError("nothing to train on")
        processes.lead(work)
    """
    with under_torchrun(tmp_path, body) as run:
        out, err = run.communicate(timeout=120)
    assert out.split("\n") == ["rank 0 ends with 2", ""]
    assert "exitcode  : 2" in err
    assert run.returncode != 0


@pytest.mark.slow
def test_under_torchrun_an_error_of_another_rank_ends_rank_0(tmp_path: Path) -> None:
    body = """
        if processes.rank == 1:
            raise UserError("this machine has no disk space")
        processes.barrier()
        time.sleep(600)
    """
    with under_torchrun(tmp_path, body) as run:
        started = time.monotonic()
        out, err = run.communicate(timeout=120)
    assert "rank 1 ends with 2" in out
    assert "exitcode  : 2" in err
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_under_torchrun_an_interrupt_ends_all_with_130(tmp_path: Path) -> None:
    body = """
        processes.lead(lambda: time.sleep(600))
    """
    with under_torchrun(tmp_path, body) as run:

        def interrupt() -> None:
            while not (tmp_path / "started-1").exists():
                time.sleep(0.1)
            time.sleep(1)
            run.send_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        out, _ = run.communicate(timeout=120)
        thread.join()
    assert out.split("\n") == ["rank 0 ends with 130", ""]
