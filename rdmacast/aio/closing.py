"""Ends of connections whose peer may not answer."""

import asyncio
import sys
import termios
from fcntl import ioctl

LINGER_S = 2.0
_MAX_CHECKS = 15  # event loops themselves end TLS after 30 s


def close_soon(transport: asyncio.WriteTransport) -> None:
    """Close a connection on which little is unsent, within LINGER_S.

    Event loops wait 30 s for the end of TLS from a silent peer. A shorter `ssl_shutdown_timeout` would cut
    off long responses, whose sending counts towards it.
    """
    transport.close()
    asyncio.get_running_loop().call_later(LINGER_S, abort, transport)


def abort_when_received(
    transport: asyncio.WriteTransport, checks: int = _MAX_CHECKS, *, linger_s: float = LINGER_S
) -> None:
    """End the TLS of a closing connection within `linger_s` of the receipt of all that was sent.

    Does nothing without TLS, of which nothing waits for the peer.
    """
    if checks and transport.get_extra_info("ssl_object") is not None:
        loop = asyncio.get_running_loop()
        loop.call_later(linger_s, _abort_if_received, transport, checks - 1, linger_s)


def _abort_if_received(transport: asyncio.WriteTransport, checks: int, linger_s: float) -> None:
    connection = transport.get_extra_info("socket")  # None once it is closed
    descriptor = -1 if connection is None else connection.fileno()
    if descriptor < 0:
        return
    try:  # what the kernel holds is not acknowledged; while it holds something the loop may hold more
        unreceived = int.from_bytes(ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:  # closed
        return
    if unreceived or transport.get_write_buffer_size():
        abort_when_received(transport, checks, linger_s=linger_s)
    else:
        abort(transport)


def abort(transport: asyncio.WriteTransport) -> None:
    """Close a connection now; does nothing if it is closed."""
    # Python 3.11's TLS transport forgets its protocol when the connection is lost, and then cannot abort.
    if getattr(transport, "_ssl_protocol", transport) is not None:
        transport.abort()
