"""One TCP stream between two hosts, to measure what their link carries.

`python -m benchmarks.testbed.link_rate give ADDRESS BYTES` prints its port and sends BYTES to the first
client; `python -m benchmarks.testbed.link_rate take ADDRESS PORT` receives them and prints a measurement.
"""

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """One copy; `seconds` count from the request."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


def give(address: str, nbytes: int) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        taken, _ = server.accept()
        with taken:
            taken.settimeout(TIMEOUT_S)
            taken.recv(1)
            chunk = memoryview(bytes(CHUNK_BYTES))
            while nbytes:
                nbytes -= taken.send(chunk[: min(nbytes, CHUNK_BYTES)])


def take(address: str, port: int) -> LinkMeasurement:
    into = memoryview(bytearray(CHUNK_BYTES))
    with socket.create_connection((address, port), timeout=TIMEOUT_S) as connection:
        started_s = time.monotonic()
        connection.sendall(b"?")
        done = 0
        while count := connection.recv_into(into):
            done += count
        return LinkMeasurement(nbytes=done, seconds=time.monotonic() - started_s)


def main() -> None:
    match sys.argv[1:]:
        case ["give", address, nbytes]:
            give(address, int(nbytes))
        case ["take", address, port]:
            print(json.dumps(asdict(take(address, int(port)))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
