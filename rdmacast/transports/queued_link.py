"""The base of links that read by a queue of reads: a device's, or an agent's."""

from rdmacast.errors import LinkClosed
from rdmacast.protocol.client_link import ClientLink
from rdmacast.transports.controlled import ControlledLink
from rdmacast.transports.verbs.reads import ReadQueue


class QueuedLink(ControlledLink):
    """A Link by a queue of reads; its end, or that of the connection, is the end of both."""

    def __init__(self, link: ClientLink, reads: ReadQueue) -> None:
        super().__init__(link)
        self._reads = reads
        self._before = reads.received_bytes  # the test's

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._reads!r}, {self._link!r})"

    @property
    def received_bytes(self) -> int:
        return self._reads.received_bytes - self._before

    async def aclose(self) -> None:
        self._reads.close(LinkClosed("the link was closed"))
        await super().aclose()
