"""The fake of the exporter seam: replies that name what was exported."""

from collections.abc import Iterator
from contextlib import contextmanager

from rdmacast.errors import NotShared
from rdmacast.exporter import ExportedRange


class MemoryExporter:
    """An Exporter that records what peers hold. With `refuses`, nothing is shared."""

    def __init__(self, name: str = "memory", *, refuses: bool = False) -> None:
        self.name = name
        self.refuses = refuses
        self.sessions: list[MemoryExporterSession] = []

    def session(self) -> "MemoryExporterSession":
        """Open a session and record it."""
        session = MemoryExporterSession(self)
        self.sessions.append(session)
        return session


class MemoryExporterSession:
    """An ExporterSession; `held` are the replies whose grants were not released."""

    def __init__(self, exporter: MemoryExporter) -> None:
        self._exporter = exporter
        self.held: list[bytes] = []
        self.closed = False

    @contextmanager
    def connect(self, payload: bytes) -> Iterator[bytes]:
        """Return the payload."""
        with self._holding(payload) as reply:
            yield reply

    @contextmanager
    def export(self, exported: ExportedRange) -> Iterator[bytes]:
        """Name the region and its range."""
        text = f"{exported.region}#{exported.serial} {exported.offset}+{exported.nbytes}"
        with self._holding(text.encode()) as reply:
            yield reply

    def close(self) -> None:
        """Mark the session as closed."""
        self.closed = True

    @contextmanager
    def _holding(self, reply: bytes) -> Iterator[bytes]:
        if self._exporter.refuses:
            raise NotShared(f"{self._exporter.name} refuses")
        self.held.append(reply)
        try:
            yield reply
        finally:
            self.held.remove(reply)
