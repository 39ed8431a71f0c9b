"""TCP ports that nobody else takes between being chosen and being listened on."""

from __future__ import annotations

import contextlib
import socket
import sys

from stepgym.errors import UserError

HOST = "127.0.0.1"


class Port:
    """A port on 127.0.0.1, held from now until `close`.

    A server may listen on it meanwhile: the socket that holds it never listens, and both allow the address to be used
    again. The system gives the port to nobody who asks for just any, and no other run of stepgym takes it.

    Args:
        number: The port; 0 takes a free one.

    Raises:
        UserError: Somebody listens on it, or another run holds it.
    """

    def __init__(self, number: int = 0) -> None:
        self._held = contextlib.ExitStack()
        try:
            one = self._held.enter_context(socket.socket())
            if number:  # connections that ended a moment ago are no hindrance
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((HOST, number))
            # Only now, else "any port" might be one that somebody else holds in this way.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.number = int(one.getsockname()[1])
            if sys.platform == "linux":  # a name without a file, given back however the process ends
                other = self._held.enter_context(socket.socket(socket.AF_UNIX))
                other.bind(f"\0stepgym-port-{self.number}")
        except (OSError, OverflowError) as error:
            self._held.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(f"engine.port: {number} cannot be used: {reason}; give another") from None

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back. Safe to call twice."""
        self._held.close()
