"""Connections whose bytes go before those of models, where a link's queue has bands."""

import socket
from contextlib import suppress

_INTERACTIVE = 6  # of Linux's priorities the most urgent that anybody may set


def make_urgent(connection: socket.socket) -> None:
    """What is sent over it from now on is short, and somebody waits: queues of this host let it go first."""
    with suppress(OSError):  # then it waits its turn
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _INTERACTIVE)
