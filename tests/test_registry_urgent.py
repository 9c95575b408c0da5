"""Which connections go before the bytes of models."""

import socket

from registry.urgent import make_urgent


def test_what_is_urgent_has_the_most_urgent_priority_that_anybody_may_set() -> None:
    connection, other = socket.socketpair()
    with connection, other:
        make_urgent(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0


def test_a_connection_that_cannot_be_urgent_is_left_as_it_is() -> None:
    connection, other = socket.socketpair()
    connection.close()
    with other:
        make_urgent(connection)
