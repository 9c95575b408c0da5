"""Priority of connections in queues with bands: urgent ones first, then serving, then weights.

Linux hosts read the socket's priority, DSCP-aware switches and routers the IP header. Connections that are
not marked, such as those for K and V, are between the two.
"""

import socket
from contextlib import suppress

_INTERACTIVE, _LOW_DELAY = 6, 0x10  # the highest Linux priority that needs no privilege; the header's TOS
_BULK, _THROUGHPUT = 2, 0x08


def make_urgent(connection: socket.socket) -> None:
    """Mark the packets of the connection as urgent: they are short, and awaited."""
    _mark(connection, _INTERACTIVE, _LOW_DELAY)


def make_bulk(connection: socket.socket) -> None:
    """Mark the packets of the connection as bulk: they take what the others leave of a link."""
    _mark(connection, _BULK, _THROUGHPUT)


def _mark(connection: socket.socket, priority: int, tos: int) -> None:
    with suppress(OSError):
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
    with suppress(OSError):  # set last, because the TOS sets a priority too
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
