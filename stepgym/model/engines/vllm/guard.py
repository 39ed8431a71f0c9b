"""Runs a command, and ends it with every process that it started when the process that asked for it is gone.

Run as a script, by any Python: `python guard.py PID_FILE COMMAND...`. The asking process holds the other end of
standard input; when that closes (the process ended, however it ended) or on SIGTERM, the command's whole process
group gets SIGTERM and, ten seconds later, SIGKILL. When the command itself ends, what is left of its group is killed
at once. Exits with the command's exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import signal
import subprocess
import sys
import threading
import time

PATIENCE = 10.0
"""Seconds between SIGTERM and SIGKILL."""

_PR_SET_CHILD_SUBREAPER = 36
_SHARED = re.compile(r" /dev/shm/(psm_|sem\.mp-)\S+$")  # memory and semaphores of Python's multiprocessing


class Command:
    """A command in a process group of its own, whose members are all waited for here."""

    def __init__(self, words: list[str]) -> None:
        # A session of its own: a Ctrl-C in the terminal is for the asking process, which then ends us in order.
        self.group = subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL).pid
        self.exit_code: int | None = None

    def collect(self) -> None:
        """Wait for those who have ended: an ended process counts as a member of its group until then."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.group:
                    self.exit_code = os.waitstatus_to_exitcode(ended[1])

    def end(self) -> None:
        """End every process of the group: with a moment to tidy up, unless their leader has died under them."""
        memory = self._shared_memory()
        for number in (signal.SIGTERM, signal.SIGKILL) if self.exit_code is None else (signal.SIGKILL,):
            deadline = time.monotonic() + PATIENCE
            there = self._signal(number)
            while there and time.monotonic() < deadline:
                self.collect()
                there = self._signal(0)
                time.sleep(0.05 if there else 0)
        for path in memory:  # who is killed cannot tidy up
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _shared_memory(self) -> set[str]:
        """The shared memory and semaphores that Python processes of the group hold, by their files."""
        found = set()
        for path in glob.glob("/proc/[0-9]*"):
            try:
                if os.getpgid(int(path[6:])) == self.group:
                    with open(f"{path}/maps", encoding="utf-8", errors="replace") as maps:
                        found |= {line.split()[5] for line in maps if _SHARED.search(line)}
            except (OSError, IndexError):
                continue
        return found

    def _signal(self, number: int) -> bool:
        """Whether there was anyone to get the signal."""
        try:
            os.killpg(self.group, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def main() -> int:
    """Run the command of the command line to its end."""
    if sys.platform == "linux":  # orphans of the group become our children, so that they can be waited for
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())  # before there is anything to end
    command = Command(sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after, because what is ignored is inherited
    try:
        with open(sys.argv[1], "w", encoding="ascii") as file:
            file.write(str(command.group))
    except OSError:  # its folder is gone: the asker has given up
        ending.set()

    def wait_for_the_asker() -> None:
        while os.read(0, 4096):
            pass
        ending.set()

    threading.Thread(target=wait_for_the_asker, daemon=True).start()
    while command.exit_code is None and not ending.wait(0.1):
        command.collect()
    command.end()
    command.collect()
    code = command.exit_code
    return 1 if code is None else 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
