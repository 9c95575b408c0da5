"""The serving end of reads by NIXL: memory that the node's agent describes."""

from collections.abc import Iterator
from contextlib import contextmanager

from rdmacast.errors import ProtocolError
from rdmacast.exporter import ExportedRange, StatelessExporter
from rdmacast.transports.nixl.node import NixlNode


class NixlExporter(StatelessExporter):
    """An Exporter by the NIXL agent of `node`."""

    name = "nixl"

    def __init__(self, node: NixlNode) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"NixlExporter({self._node!r})"

    @contextmanager
    def connect(self, payload: bytes) -> Iterator[bytes]:
        """Describe the memory of the test read; inside, the agent serves it."""
        if payload:
            raise ProtocolError("NIXL's connect request has no payload")
        with self._node.probe() as probe:
            yield probe.encode()

    @contextmanager
    def export(self, exported: ExportedRange) -> Iterator[bytes]:
        """Describe the range; inside, the agent serves it. Raises NotShared."""
        view = exported.source.view(exported.offset, exported.nbytes)
        with self._node.shared(view) as memory:
            yield memory.encode()
