"""The exporter seam: how the memory of a served region is made readable by one transport."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

from rdmacast.errors import ProtocolError
from rdmacast.transport import RegionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRange:
    """A range of a published region that is present and stays in memory while it is exported.

    `serial` distinguishes the publication from others of the same name, before or after.
    """

    region: str
    serial: int
    source: RegionSource
    offset: int
    nbytes: int


class ExporterSession(Protocol):
    """An exporter's state for one link; all methods belong to the event loop's thread.

    A payload that breaks the transport's format raises ProtocolError; what this node cannot share raises
    NotShared.
    """

    def connect(self, payload: bytes) -> AbstractContextManager[bytes]:
        """Answer a request without a range; inside, what the reply grants is valid."""
        ...

    def export(self, exported: ExportedRange) -> AbstractContextManager[bytes]:
        """Describe a range to the peer; inside, the peer may read it."""
        ...

    def close(self) -> None:
        """End every access of the peer; on return nothing is read any more. Idempotent."""
        ...


class Exporter(Protocol):
    """A transport's serving end on this node; it outlives the server that it is registered with."""

    @property
    def name(self) -> str:
        """The transport's name, the `kind` of its requests."""
        ...

    def session(self) -> ExporterSession:
        """Open the state for one link."""
        ...


class StatelessExporter:
    """An Exporter without state by link, which is its own session.

    A subclass defines `name` and `export`.
    """

    name = ""

    def session(self) -> Self:
        """Return the exporter itself."""
        return self

    def connect(self, payload: bytes) -> AbstractContextManager[bytes]:
        """Refuse: the transport has no connect request."""
        raise ProtocolError(f"{self.name} has no connect request")

    def close(self) -> None:
        """Keep what is exported: each export ends by itself."""
