"""What links share that read by a queue of reads: a device's, or an agent's."""

from rdmacast.client_link import ClientLink
from rdmacast.controlled import ControlledLink
from rdmacast.errors import LinkClosed
from rdmacast.verbs_reads import ReadQueue


class QueuedLink(ControlledLink):
    """The part of a Link that is its queue. Its end, or that of the connection, is the end of both."""

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
