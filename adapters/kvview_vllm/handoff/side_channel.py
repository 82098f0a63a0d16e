"""A faulty TCP server in place of a producer's side channel."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal

SideChannelFault = Literal["silent", "closed", "garbage"]


class FaultySideChannel:
    """Accepts connections, and then stays silent, closes them, or sends garbage.

    Args:
        fault: The fault.
    """

    def __init__(self, fault: SideChannelFault) -> None:
        self._fault = fault
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                if self._fault == "closed":
                    connection.close()
                    continue
                self._accepted.append(connection)
                if self._fault == "garbage":
                    connection.sendall(b"\x00garbage" * 20)

    def close(self) -> None:
        """Close all connections, and end the thread."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()  # it may still accept a connection
        for open_socket in (self._server, *self._accepted):
            open_socket.close()
