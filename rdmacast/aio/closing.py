"""Ends of connections whose peer may not answer."""

import asyncio

LINGER_S = 2.0


def close_soon(transport: asyncio.WriteTransport) -> None:
    """Close a connection on which little is unsent, within LINGER_S.

    Event loops wait 30 s for the end of TLS from a silent peer. A shorter `ssl_shutdown_timeout` would cut
    off long responses, whose sending counts towards it.
    """
    transport.close()
    asyncio.get_running_loop().call_later(LINGER_S, abort, transport)


def abort(transport: asyncio.WriteTransport) -> None:
    """Close a connection now; does nothing if it is closed."""
    # Python 3.11's TLS transport forgets its protocol when the connection is lost, and then cannot abort.
    if getattr(transport, "_ssl_protocol", transport) is not None:
        transport.abort()
