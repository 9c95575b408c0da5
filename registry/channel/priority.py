"""Connections whose bytes go before those of models, where a link's queue has bands."""

import socket
from contextlib import suppress

_INTERACTIVE = 6  # of Linux's priorities the most urgent that anybody may set
_LOW_DELAY = 0x10  # in packets' headers, for queues on their way


def make_urgent(connection: socket.socket) -> None:
    """What is sent over it from now on is short, and somebody waits: queues of this host let it go first, and
    so do those of switches that heed what packets say."""
    with suppress(OSError):
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOW_DELAY)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOW_DELAY)
    with suppress(OSError):  # then it waits its turn; after the other, which sets this too
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _INTERACTIVE)
