"""What a client of the chaos load reports of a gateway that does not answer."""

import socket
from collections.abc import Iterator

import pytest

from benchmarks.chaos.load import RequestFate, TenantClient, request_templates

LIMIT_S = 0.2


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a socket which listens with room for one connection, and accepts none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        yield listener


def client(listener: socket.socket) -> TenantClient:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return TenantClient(0, url, "acme", "key", connect_s=LIMIT_S)


async def test_without_a_connection_in_time_a_gateway_is_unreached(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()):  # the backlog is full: further SYNs are dropped
        issued, _ = await client(listener).ask("r-1", request_templates(4)[0], 60.0)
    assert issued.fate is RequestFate.UNREACHED and issued.detail == "no connection in 0.2 s"


async def test_without_an_answer_in_time_a_request_hangs(listener: socket.socket) -> None:
    issued, _ = await client(listener).ask("r-1", request_templates(4)[0], LIMIT_S)
    assert issued.fate is RequestFate.HUNG and issued.detail == "0.2 s for a response; b''"
