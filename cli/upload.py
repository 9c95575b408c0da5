"""Resumable uploads of blobs to the gateway's store."""

from collections.abc import Iterator

from cli.client import Client
from cli.errors import CliError
from cli.progress import Meter

TRIES = 5
CHUNK_BYTES = 1 << 20


class Source:
    """Bytes that can be read again from any offset."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def chunks(self, offset: int) -> Iterator[bytes]:
        raise NotImplementedError


class MemorySource(Source):
    def __init__(self, content: bytes) -> None:
        super().__init__(len(content))
        self._content = content

    def chunks(self, offset: int) -> Iterator[bytes]:
        for start in range(offset, self.nbytes, CHUNK_BYTES):
            yield self._content[start : start + CHUNK_BYTES]


def upload(client: Client, digest: str, source: Source, meter: Meter) -> None:
    """Send what the store lacks of a blob, going on where an interrupted upload ended.

    Raises CliError once several tries in a row have got nowhere.
    """
    counted, failures = 0, 0
    while True:
        offset = resume_offset(client, digest)
        meter.advance(max(0, offset - counted))
        counted = max(counted, offset)

        def body(start: int = offset) -> Iterator[bytes]:
            nonlocal counted
            sent = start
            for chunk in source.chunks(start):
                yield chunk
                sent += len(chunk)
                if sent > counted:
                    meter.advance(sent - counted)
                    counted = sent

        try:
            client.request(
                "PATCH",
                f"/admin/blobs/{digest}",
                content=body(),
                headers={
                    "upload-offset": str(offset),
                    "upload-length": str(source.nbytes),
                    "content-type": "application/octet-stream",
                },
            )
            return
        except CliError as exc:
            if type(exc) is not CliError:  # refused for a reason that trying again does not mend
                raise
            failures = 0 if resume_offset(client, digest) > offset else failures + 1
            if failures >= TRIES:
                raise


def resume_offset(client: Client, digest: str) -> int:
    """How much of an unfinished upload the store has."""
    return int(client.request("HEAD", f"/admin/blobs/{digest}").headers.get("upload-offset", "0"))
