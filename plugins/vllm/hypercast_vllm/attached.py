"""An image that a node gives to this process: mapped read-only, and read as it arrives.

The node answers on a Unix socket: see invoker/loading/attach.py of Hypercast. The standard library alone is
needed here.
"""

import json
import mmap
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NODE_SOCKETS = "/dev/shm", "hypercast-*/.attach/*.sock"
MAX_LINE_BYTES = 1 << 20
MAX_HEADER_BYTES = 100_000_000  # of the safetensors format
CONNECT_TIMEOUT_S = 10.0
DEFAULT_TIMEOUT_S = 600.0  # without any news of the image


class AttachError(RuntimeError):
    """The node cannot give the image, or is gone."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the image: a safetensors dtype name, and its bytes `[start, end)` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class AttachedImage:
    """An image of a node, valid while it is open. `tensors` yields each tensor once its bytes are there."""

    def __init__(self, connection: socket.socket, fd: int, nbytes: int, rest: bytes) -> None:
        self.nbytes = nbytes
        self._connection = connection
        self._rest = rest
        self._ready: list[tuple[int, int]] = []
        self._done = False
        try:
            self.memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def __enter__(self) -> "AttachedImage":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors in the order in which they arrive. Raises AttachError."""
        waiting: list[Tensor] | None = None
        while waiting is None or waiting:
            if waiting is None and self._has(0, 8):
                length = int.from_bytes(self.memory[:8], "little")
                if not 0 < length <= min(MAX_HEADER_BYTES, self.nbytes - 8):
                    raise AttachError("the image was packed by an earlier release: deploy the model again")
                if self._has(0, 8 + length):
                    waiting = parse_header(self.memory[8 : 8 + length], 8 + length, self.nbytes)
            if waiting is not None:
                rest = []
                for tensor in waiting:
                    if self._has(tensor.start, tensor.end):
                        yield tensor
                    else:
                        rest.append(tensor)
                waiting = rest
                if not waiting:
                    return
            self._wait()

    def _has(self, start: int, end: int) -> bool:
        return self._done or any(first <= start and end <= last for first, last in self._ready)

    def _wait(self) -> None:
        """Wait for the next line of the node. Raises AttachError."""
        line = self._line()
        if "error" in line:
            raise AttachError(f"the node: {line['error']}")
        match line:
            case {"done": True}:
                self._done = True
            case {"ready": [int(start), int(end)]}:
                self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        """Add a range, joined with those that it touches."""
        apart = []
        for first, last in self._ready:
            if last < start or end < first:
                apart.append((first, last))
            else:
                start, end = min(start, first), max(end, last)
        self._ready = [*apart, (start, end)]

    def _line(self) -> dict[str, object]:
        while b"\n" not in self._rest:
            try:
                data = self._connection.recv(65536)
            except TimeoutError:
                raise AttachError("no part of the image arrived in time") from None
            except OSError as error:
                raise AttachError(f"the node is gone: {error}") from error
            if not data:
                raise AttachError("the node is gone: it closed the connection before the image was complete")
            self._rest += data
            if len(self._rest) > MAX_LINE_BYTES:
                raise AttachError("the node broke the protocol")
        line, _, self._rest = self._rest.partition(b"\n")
        decoded = json.loads(line)
        if not isinstance(decoded, dict):
            raise AttachError("the node broke the protocol")
        return decoded


def attach(
    request: dict[str, str], path: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> AttachedImage:
    """Return the image of `{"image": SHA256}` or `{"model": NAME}` from the node at `path`.

    By default that is the only node of this user on the machine. Raises AttachError.
    """
    path = path or find_node()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            connection.settimeout(timeout_s)
            data, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
        except OSError as error:
            raise AttachError(f"no node answers at {path}: {error}") from error
        line, newline, rest = data.partition(b"\n")
        if not newline:
            raise AttachError(f"the node at {path} closed the connection")
        answer = json.loads(line)
        if "error" in answer or not descriptors:
            raise AttachError(f"the node: {answer.get('error', 'it sent no file')}")
        return AttachedImage(connection, descriptors[0], int(answer["nbytes"]), rest)
    except BaseException:
        connection.close()
        raise


def find_node() -> str:
    """Return the socket of the only node of this user on the machine. Raises AttachError."""
    if path := os.environ.get("HYPERCAST_NODE_SOCKET"):
        return path
    root, pattern = NODE_SOCKETS
    found = [str(path) for path in sorted(Path(root).glob(pattern)) if path.stat().st_uid == os.geteuid()]
    if not found:
        raise AttachError(
            f"no Hypercast node of this user runs on this machine ({root}/{pattern}): start one with "
            "`hypercast up` or `hypercast invoker`, or name its socket"
        )
    if len(found) > 1:
        raise AttachError(
            "several Hypercast nodes run on this machine: name the socket of one in "
            f"--model-loader-extra-config or HYPERCAST_NODE_SOCKET, such as {found[0]}"
        )
    return found[0]


def parse_header(header: bytes, data_at: int, nbytes: int) -> list[Tensor]:
    """Return the tensors of a safetensors header, in the order of their bytes. Raises AttachError."""
    try:
        fields = json.loads(header)
        tensors = [
            Tensor(
                name,
                str(field["dtype"]),
                tuple(int(size) for size in field["shape"]),
                data_at + int(field["data_offsets"][0]),
                data_at + int(field["data_offsets"][1]),
            )
            for name, field in fields.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise AttachError(f"the image's header is not one of a safetensors file: {error}") from error
    if any(not data_at <= tensor.start <= tensor.end <= nbytes for tensor in tensors):
        raise AttachError("a tensor of the image lies outside of it")
    return sorted(tensors, key=lambda tensor: tensor.start)
