"""Uploads that are interrupted, against a real HTTP server that loses connections on demand."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.client import Client
from cli.errors import CliError, UsageError
from cli.settings import ClientSettings
from cli.upload.blobs import CHUNK_BYTES, MAX_FAILURES, memory_source, upload

CONTENT = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"end"


class Store(ThreadingHTTPServer):
    """Takes one blob; the first `faults` bodies break off after a chunk or so, `refuse` is a status."""

    def __init__(self, faults: int = 0, refuse: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.refuse = faults, refuse
        self.received = b""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_HEAD(self) -> None:
        self.answer(200)

    def do_PATCH(self) -> None:
        assert int(self.headers["upload-offset"]) == len(self.server.received)
        while size := int(self.rfile.readline(), 16):
            self.server.received += self.rfile.read(size)
            self.rfile.readline()
            if self.server.faults:
                self.server.faults -= 1
                self.close_connection = True
                self.connection.shutdown(2)
                return
        self.rfile.readline()
        self.answer(self.server.refuse or 204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("upload-offset", str(len(self.server.received)))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class Counted:
    total = 0

    def advance(self, amount: int) -> None:
        assert amount > 0
        self.total += amount

    def reach(self, done: int) -> None:
        raise AssertionError("uploads advance")


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    made: list[Store] = []
    yield made
    for store in made:
        store.shutdown()
        store.server_close()


def run(stores: list[Store], store: Store, waits: list[float]) -> Counted:
    threading.Thread(target=store.serve_forever, daemon=True).start()
    stores.append(store)
    meter = Counted()
    settings = ClientSettings(url=f"http://127.0.0.1:{store.server_port}", api_key=None)
    with Client(settings) as client:
        digest = hashlib.sha256(CONTENT).hexdigest()
        upload(client, digest, memory_source(CONTENT), meter, wait=waits.append)
    return meter


def test_broken_connections_are_gone_on_from(stores: list[Store]) -> None:
    store, waits = Store(faults=3), []
    meter = run(stores, store, waits)
    assert store.received == CONTENT
    assert meter.total == len(CONTENT)
    assert len(waits) == 3


def test_it_gives_up_where_nothing_gets_through() -> None:
    waits: list[float] = []
    with Client(ClientSettings(url="http://127.0.0.1:9", api_key=None)) as client:
        with pytest.raises(CliError, match="cannot reach"):
            upload(client, "0" * 64, memory_source(b"x"), Counted(), wait=waits.append)
    assert len(waits) == MAX_FAILURES - 1
    assert waits == sorted(waits) and sum(waits) > 10


def test_a_refusal_is_final(stores: list[Store]) -> None:
    waits: list[float] = []
    with pytest.raises(UsageError):
        run(stores, Store(refuse=400), waits)
    assert waits == []
