"""Which connections go before the bytes of models."""

import socket

import pytest

from registry.channel.priority import make_urgent


def test_what_is_urgent_has_the_most_urgent_priority_that_anybody_may_set() -> None:
    connection, other = socket.socketpair()
    with connection, other:
        make_urgent(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0


@pytest.mark.parametrize(
    ("address", "family", "level", "field"),
    [
        ("127.0.0.1", socket.AF_INET, socket.IPPROTO_IP, socket.IP_TOS),
        ("::1", socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    ],
)
def test_packets_say_so_on_their_way(address: str, family: int, level: int, field: int) -> None:
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"nothing can listen at {address}: {error}")
    with listening, socket.create_connection(listening.getsockname()[:2]) as connection:
        make_urgent(connection)
        assert connection.getsockopt(level, field) == 0x10
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6


def test_a_connection_that_cannot_be_urgent_is_left_as_it_is() -> None:
    connection, other = socket.socketpair()
    connection.close()
    with other:
        make_urgent(connection)
