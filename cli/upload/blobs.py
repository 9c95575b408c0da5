"""Resumable uploads of blobs to the store of a gateway."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cli.client import Client
from cli.errors import CliError
from cli.progress import Meter

FIRST_WAIT_S = 0.2
MAX_FAILURES = 7  # tries without any progress: about 25 s with the doubling waits between them
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes that can be read repeatedly: `chunks` yields them from an offset on."""

    nbytes: int
    chunks: Callable[[int], Iterator[bytes]]


def memory_source(content: bytes) -> Source:
    """Return a blob in memory as a source."""

    def chunks(offset: int) -> Iterator[bytes]:
        for start in range(offset, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]

    return Source(len(content), chunks)


def upload(
    client: Client,
    digest: str,
    source: Source,
    meter: Meter,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Send what the store lacks of a blob, from where an interrupted upload ended.

    Retries while the gateway is unavailable, for example during a restart. Raises CliError after several
    tries without progress, and at once for a refusal that a retry cannot change.
    """
    shown = furthest = failures = 0

    def counted(start: int) -> Iterator[bytes]:
        nonlocal shown
        for chunk in source.chunks(start):
            yield chunk
            start += len(chunk)
            if start > shown:
                meter.advance(start - shown)
                shown = start

    while True:
        try:
            offset = resume_offset(client, digest)
            if offset > furthest:
                furthest, failures = offset, 0
            if offset > shown:
                meter.advance(offset - shown)
                shown = offset
            send(client, digest, counted(offset), offset, source.nbytes)
            return
        except CliError as exc:
            failures += 1
            if type(exc) is not CliError or failures >= MAX_FAILURES:
                raise
            wait(FIRST_WAIT_S * 2 ** (failures - 1))


def send(client: Client, digest: str, body: Iterator[bytes], offset: int, total: int) -> None:
    """Send the bytes of a blob from `offset` to its end."""
    client.request(
        "PATCH",
        f"/admin/blobs/{digest}",
        content=body,
        headers={
            "upload-offset": str(offset),
            "upload-length": str(total),
            "content-type": "application/octet-stream",
        },
    )


def resume_offset(client: Client, digest: str) -> int:
    """Return how many bytes of an unfinished upload the store has."""
    return int(client.request("HEAD", f"/admin/blobs/{digest}").headers.get("upload-offset", "0"))
