"""One vLLM server: started, waited for, watched, started again once, and ended with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stepgym.errors import EngineError
from stepgym.model.engines.vllm import dialect, guard
from stepgym.model.engines.vllm.dialect import Call
from stepgym.model.engines.vllm.options import ServerOptions

logger = logging.getLogger(__name__)

_LOG_LINES = 12
_ADMIN_TIMEOUT = 600.0
# No proxy leads to a server on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_UNREMARKABLE = re.compile(r"^\(\w+ pid=\d+\)\s*|^(INFO|WARNING|ERROR|DEBUG) \d\d-\d\d [\d:]+ (\[[^\]]*\])?\s*")


class VLLMServer:
    """A vLLM server as a process of its own, in its own virtual environment.

    A thread starts it, waits until it is healthy, and watches it. If it dies unasked, its last log lines are logged
    and it is started again, `restarts` times in all, with the weights that it had last.

    Args:
        options: What it is started with.
        folder: Where its logs go.
        restarts: How often it is started again.
        start_timeout: Seconds from start to healthy.
        on_progress: Called, from the thread, with a line about how far the start has come.
        before_restart: Called, from the thread, before it is started again.
        after_restart: Called, from the thread, before it counts as ready again.
    """

    def __init__(
        self,
        options: ServerOptions,
        folder: Path,
        *,
        restarts: int = 1,
        start_timeout: float = 600.0,
        on_progress: Callable[[str], None] | None = None,
        before_restart: Callable[[VLLMServer], None] | None = None,
        after_restart: Callable[[VLLMServer], None] | None = None,
    ) -> None:
        self.options = options
        self.folder = folder
        self.starts = 0
        """How often it has been started."""
        self.started_with = options
        """The options of the latest start."""
        self.administration = threading.RLock()
        """Held while requests to its administration are sent that belong together."""
        self.failure: str | None = None
        """Why it is dead for good; None while it is not."""
        self._restarts = restarts
        self._start_timeout = start_timeout
        self._on_progress = on_progress
        self._before_restart = before_restart
        self._after_restart = after_restart
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Root address."""
        return f"http://127.0.0.1:{self.options.port}"

    @property
    def log(self) -> Path:
        """Log file of the latest start."""
        return self.folder / f"vllm-{self.options.port}-{self.starts}.log"

    @property
    def pid(self) -> int | None:
        """Process id of the server itself, which is its process group's too; None before it is known."""
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None

    @property
    def is_ready(self) -> bool:
        """Whether it is healthy, as far as is known."""
        return self._ready.is_set()

    def start(self) -> None:
        """Begin to start the server; does not wait."""
        if self._thread is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"stepgym-vllm-{self.options.port}"
            self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)
            self._thread.start()

    async def ready(self) -> None:
        """Wait until the server is healthy. Raises `EngineError`, with its last log lines, when it is dead."""
        # Polled, because the waiting loops are many and none of them is the thread's.
        while not self._ready.is_set():
            if self.failure is not None:
                raise EngineError(self.failure)
            if self._closing.is_set():
                raise EngineError("the vLLM server is closed")
            await asyncio.sleep(0.02)

    def restart_with(self, *, model: Path) -> None:
        """A restart shall load this model folder: the weights that the server was given last."""
        self.options = replace(self.options, model=str(model))

    def call(self, call: Call, *, timeout: float = _ADMIN_TIMEOUT) -> None:
        """Send one request to the server's administration. Raises `EngineError`."""
        # The standard library's client: threads must not import what the event loop's client looks at meanwhile.
        where = self.url + call.path
        query = "?" + urllib.parse.urlencode(call.parameters) if call.parameters else ""
        data = json.dumps(dict(call.body or {})).encode()
        request = urllib.request.Request(where + query, data, {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(request, timeout=timeout) as response:
                response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = " ".join(error.read().decode("utf-8", "replace").split())
            raise EngineError(f"{where} answered with HTTP {error.code}: {text:.500}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{where}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the server and everything that it started. Waits for that. Safe to call twice."""
        self._closing.set()
        self._ready.clear()
        process = self._process
        if process is not None:
            self._end(process)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=4 * guard.PATIENCE)  # it may be ending one that it had just begun to start

    def last_lines(self, count: int = _LOG_LINES) -> list[str]:
        """The end of the log, without the lines that say nothing."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return lines[-count:]

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._run()
        except Exception as error:  # else everybody would wait for ever
            logger.exception("the watch over the vLLM server on port %d failed", self.options.port)
            self._ready.clear()
            self.failure = f"the watch over the vLLM server on port {self.options.port} failed: {error}"
            if self._process is not None:
                self._end(self._process)

    def _run(self) -> None:
        while True:
            process, failed = None, self._run_hook(self._before_restart) if self.starts else None
            if failed is None:
                try:
                    process = self._spawn()
                    failed = self._wait_until_healthy(process)
                except OSError as error:
                    failed = f"it could not be started: {error}"
            if failed is None and self.starts > 1:
                failed = self._run_hook(self._after_restart)
            if failed is None and process is not None:
                self._ready.set()
                process.wait()
                self._ready.clear()
                failed = f"it ended with exit code {process.returncode}"
            if process is not None:
                self._end(process)
            if self._closing.is_set():
                return
            self._report(str(failed))
            if self.failure is not None:
                return

    def _run_hook(self, hook: Callable[[VLLMServer], None] | None) -> str | None:
        """None where it went well; else what went wrong."""
        try:
            if hook is not None:
                hook(self)
        except (EngineError, OSError) as error:
            return f"it could not be given its weights again: {error}"
        return None

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.started_with = self.options
        self._pid_file.unlink(missing_ok=True)
        words = [sys.executable, guard.__file__, str(self._pid_file), *dialect.command(self.started_with)]
        inherited = {k: v for k, v in os.environ.items() if k not in dialect.NOT_INHERITED}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,  # the guard ends the server when this closes, however we end
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**inherited, **dialect.environment(self.started_with)},
            )
        if self._closing.is_set():  # closed while it was being started
            self._end(self._process)
        return self._process

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> str | None:
        """None once it is; else why it is not."""
        began = time.monotonic()
        told = -1
        while not self._closing.is_set():
            if process.poll() is not None:
                return f"it ended with exit code {process.returncode} while it started"
            seconds = time.monotonic() - began
            if self._answers(dialect.HEALTH):
                self._tell(f"vLLM is ready on port {self.options.port} after {seconds:.0f} s")
                return None
            if seconds > self._start_timeout:
                return f"it was not healthy within {self._start_timeout:g} s (start_timeout)"
            if int(seconds) != told:
                told = int(seconds)
                self._tell(f"starting vLLM on port {self.options.port} ({told} s): {self._doing()}")
            self._closing.wait(0.1)
        return "closed"

    def _report(self, reason: str) -> None:
        lines = self.last_lines()
        shown = "\n".join(f"    {line}" for line in lines)
        what = f"the vLLM server on port {self.options.port} (start {self.starts}) failed: {reason}"
        if self.starts <= self._restarts:
            logger.warning("%s; starting it again; the end of %s:\n%s", what, self.log, shown)
            return
        cause = _cause(self.log) or (lines[-1] if lines else "it wrote nothing")
        self.failure = f"{what}; {cause} (log: {self.log})"
        logger.error("%s; the end of the log:\n%s", self.failure, shown)

    def _answers(self, path: str) -> bool:
        try:
            with _DIRECT.open(self.url + path, timeout=2) as response:
                return bool(response.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def _doing(self) -> str:
        lines = self.last_lines(1)
        text = lines[-1] if lines else "waiting for its first word"
        while (shorter := _UNREMARKABLE.sub("", text)) != text:
            text = shorter
        return text[:100]

    def _tell(self, line: str) -> None:
        logger.info(line)
        if self._on_progress is not None:
            self._on_progress(line)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Let the guard end the server's group; if the guard is gone or stuck, end it from here."""
        group = self.pid
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout=3 * guard.PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if group is not None:
            kill_group(group)
        with contextlib.suppress(OSError):  # the number may be somebody else's one day
            self._pid_file.unlink()

    @property
    def _pid_file(self) -> Path:
        return self.folder / f"vllm-{self.options.port}.pid"


def kill_group(group: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _cause(log: Path) -> str:
    """The line of a log that is most likely the reason: the last one of an exception, not of its consequences."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # At the beginning of a line: in the middle of one stand errors that somebody warns of, or asks about.
    start = r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [\d: -]+\[[^\]]*\] )?"
    error = r"((?:[\w.]*(?:Error|Exception|Interrupt)|[\w.-]+: error): .+)$"
    found: Sequence[str] = re.findall(start + error, text, re.MULTILINE)
    telling = [line for line in found if "Engine core initialization failed" not in line]
    return (telling or found or [""])[0].strip()[:400]
