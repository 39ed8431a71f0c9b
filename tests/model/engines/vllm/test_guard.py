"""What a server started ends with it, and with whoever asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stepgym.model.engines.vllm import guard

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{end}
"""


def start(tmp_path, end="time.sleep(600)"):
    process = subprocess.Popen(
        [sys.executable, guard.__file__, str(tmp_path / "pid"), sys.executable, "-c", FAMILY.format(end=end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    grandchild = int(process.stdout.readline())
    return process, int((tmp_path / "pid").read_text()), grandchild


def test_shared_memory_of_those_who_were_killed_is_given_back(tmp_path):
    holds = (
        "import multiprocessing.shared_memory as m, time\n"
        "block = m.SharedMemory(create=True, size=4096)\nprint(block._name, flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, guard.__file__, str(tmp_path / "pid"), sys.executable, "-c", holds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    block = Path("/dev/shm") / process.stdout.readline().strip().lstrip("/")
    assert block.exists()
    command = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 20
    while not (trackers := [p for p in psutil.Process(command).children() if "tracker" in " ".join(p.cmdline())]):
        assert time.monotonic() < end
        time.sleep(0.05)
    trackers[0].kill()  # else it would tidy up
    process.stdin.close()
    process.wait(timeout=30)
    assert not block.exists()


def gone(*pids):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", ["close", "terminate", "kill"])
def test_the_whole_group_ends_with_the_one_who_asked(tmp_path, how):
    process, command, grandchild = start(tmp_path)
    if how == "close":
        process.stdin.close()
    elif how == "terminate":
        process.terminate()
    else:
        # The guard itself is killed: the engine, which is still there, then ends the group.
        from stepgym.model.engines.vllm.server import kill_group

        process.kill()
        kill_group(command)
    process.wait(timeout=30)
    assert gone(command, grandchild)


def test_the_group_ends_with_an_asker_that_is_killed(tmp_path):
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"p = subprocess.Popen([sys.executable, {guard.__file__!r}, {str(tmp_path / 'pid')!r}, "
            "sys.executable, '-c', 'import time; time.sleep(600)'], stdin=subprocess.PIPE)\n"
            "time.sleep(600)",
        ]
    )
    end = time.monotonic() + 20
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    command = int((tmp_path / "pid").read_text())
    os.kill(asker.pid, signal.SIGKILL)
    asker.wait()
    assert gone(command)


def test_a_command_that_ends_takes_its_children_along_and_gives_its_exit_code(tmp_path):
    process, command, grandchild = start(tmp_path, end="sys.exit(7)")
    assert process.wait(timeout=30) == 7
    assert gone(command, grandchild)


def test_a_guard_that_cannot_say_whom_it_guards_leaves_nobody_behind(tmp_path):
    """The folder of its file may be gone already, where the engine was closed while it started."""
    command = [sys.executable, "-c", FAMILY.format(end="time.sleep(600)")]
    process = subprocess.Popen(
        [sys.executable, guard.__file__, str(tmp_path / "gone" / "pid"), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    said = process.stdout.read()  # ends when the last of the group has
    assert process.wait(timeout=30) != 0
    assert gone(*(int(pid) for pid in said.split()))
