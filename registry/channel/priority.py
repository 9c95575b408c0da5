"""Priority of connections with short, awaited messages over bulk transfers, in queues with bands."""

import socket
from contextlib import suppress

_INTERACTIVE = 6  # the highest Linux priority that needs no privilege
_LOW_DELAY = 0x10  # the IP header's TOS, for queues on the path


def make_urgent(connection: socket.socket) -> None:
    """Mark the packets of the connection as urgent, for queues of this host and of DSCP-aware switches."""
    with suppress(OSError):
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOW_DELAY)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOW_DELAY)
    with suppress(OSError):  # set last, because the TOS sets a priority too
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _INTERACTIVE)
