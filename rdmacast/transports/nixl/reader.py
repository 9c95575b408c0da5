"""One NIXL agent as the port of a queue of reads."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rdmacast.errors import DeviceError
from rdmacast.transports.nixl.agent import NixlAgent, NixlTransfer
from rdmacast.transports.nixl.memory import NixlMemory
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory, ReadCompletion
from rdmacast.transports.verbs.memory import RegisteredMemory

_numbers = itertools.count(1)


class AgentRegistration:
    """A Registration with an agent, which uses the processor's addresses."""

    def __init__(
        self, agent: NixlAgent, address: int, nbytes: int, closed: Callable[["AgentRegistration"], None]
    ) -> None:
        """Register the memory. Raises DeviceError."""
        self._agent = agent
        self._closed = closed
        self.address = self.iova = address
        self.nbytes = nbytes
        self.lkey = next(_numbers)
        self.metadata = agent.register(address, nbytes)

    def __repr__(self) -> str:
        return f"AgentRegistration({self.lkey}, {self.nbytes} bytes)"

    def close(self) -> None:
        self._agent.deregister(self.address, self.nbytes)
        self._closed(self)


class AgentMemory:
    """The memory that one agent may use: registered once, while it is mapped."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._metadata: dict[int, bytes] = {}  # by key
        self.registered = RegisteredMemory(self)

    def __repr__(self) -> str:
        return f"AgentMemory({len(self._metadata)} pieces, {self.registered!r})"

    def register(self, address: int, nbytes: int, *, writable: bool) -> AgentRegistration:
        made = AgentRegistration(self._agent, address, nbytes, self._forget)
        self._metadata[made.lkey] = made.metadata
        return made

    def register_gpu(self, address: int, nbytes: int) -> AgentRegistration:
        raise DeviceError("memory of a GPU is not read by NIXL yet")

    @contextmanager
    def shared(self, view: memoryview) -> Iterator[NixlMemory]:
        """Register the view inside for reads by peers. Raises DeviceError."""
        with self.registered.local(view) as memory:
            yield NixlMemory(memory.address, self._metadata[memory.lkey])

    def _forget(self, closed: AgentRegistration) -> None:
        self._metadata.pop(closed.lkey, None)


class NixlReader:
    """A ReadPort that reads from one peer at a time, by an agent of its own.

    An agent cannot cancel a read: one that has reads pending when it is closed is destroyed with them.
    """

    def __init__(self, agent: NixlAgent, idle: Callable[["NixlReader"], None]) -> None:
        """Use the agent; `idle` is called when the closed reader may be used for another peer."""
        self._agent = agent
        self._idle = idle
        self.memory = AgentMemory(agent)
        self._peer: str | None = None
        self._loaded: set[bytes] = set()
        self._pending: dict[int, NixlTransfer] = {}

    def __repr__(self) -> str:
        return f"NixlReader({self._peer}, {len(self._pending)} under way)"

    def load_metadata(self, metadata: bytes) -> None:
        """Load the metadata of the peer's agent and memory. Raises DeviceError."""
        if metadata in self._loaded:
            return
        name = self._agent.add_peer(metadata)
        if self._peer not in (None, name):
            raise DeviceError("the peer's agent is another one now")
        self._peer = name
        self._loaded.add(metadata)

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        if self._peer is None:
            raise DeviceError("the peer's agent is not known yet")
        self._pending[id] = self._agent.read(self._peer, local.address, remote.address, nbytes)

    def poll(self) -> Sequence[ReadCompletion]:
        ended = []
        for id, transfer in tuple(self._pending.items()):
            try:
                if not transfer.has_ended():
                    continue
                ended.append(ReadCompletion(id, None))
            except DeviceError as error:
                return [*ended, ReadCompletion(id, str(error))]  # it stays pending: its bytes are undefined
            del self._pending[id]
        return ended

    def close(self) -> None:
        if not self._pending and self._forget_peer():
            self._idle(self)
        else:
            self.destroy()

    def destroy(self) -> None:
        """Close the agent, whatever is pending. Idempotent."""
        self._pending.clear()
        self._agent.close()
        self.memory.registered.close()

    def _forget_peer(self) -> bool:
        """Remove the peer; returns whether the agent can be used again."""
        peer, self._peer = self._peer, None
        self._loaded.clear()
        try:
            if peer is not None:
                self._agent.remove_peer(peer)
        except DeviceError:
            return False
        return True
