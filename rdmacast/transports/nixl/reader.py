"""One agent's end of reads by NIXL, as a queue of reads uses it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rdmacast.errors import DeviceError
from rdmacast.nixl_agent import NixlAgent, NixlTransfer
from rdmacast.nixl_memory import ShownMemory
from rdmacast.verbs_address import RemoteMemory
from rdmacast.verbs_device import Completion, LocalMemory
from rdmacast.verbs_memory import RegisteredMemory

_numbers = itertools.count(1)


class AgentRegistration:
    """A Registration with an agent, which counts memory from where the processor does."""

    def __init__(
        self, agent: NixlAgent, address: int, nbytes: int, closed: Callable[["AgentRegistration"], None]
    ) -> None:
        """Raises DeviceError."""
        self._agent = agent
        self._closed = closed
        self.address = self.iova = address
        self.nbytes = nbytes
        self.lkey = self.rkey = next(_numbers)
        self.metadata = agent.register(address, nbytes)

    def __repr__(self) -> str:
        return f"AgentRegistration({self.rkey}, {self.nbytes} bytes)"

    def close(self) -> None:
        self._agent.deregister(self.address, self.nbytes)
        self._closed(self)


class AgentMemory:
    """The memory that one agent may use: registered once, and as long as it is mapped."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._metadata: dict[int, bytes] = {}  # by key
        self.registered = RegisteredMemory(self)

    def __repr__(self) -> str:
        return f"AgentMemory({len(self._metadata)} pieces, {self.registered!r})"

    def register(self, address: int, nbytes: int, *, writable: bool) -> AgentRegistration:
        made = AgentRegistration(self._agent, address, nbytes, self._forget)
        self._metadata[made.rkey] = made.metadata
        return made

    def register_gpu(self, address: int, nbytes: int) -> AgentRegistration:
        raise DeviceError("memory of a GPU is not read by NIXL yet")

    @contextmanager
    def shown(self, view: memoryview) -> Iterator[ShownMemory]:
        """Inside, peers may read the view. Raises DeviceError."""
        with self.registered.remote(view) as memory:
            yield ShownMemory(memory.address, self._metadata[memory.rkey])

    def _forget(self, closed: AgentRegistration) -> None:
        self._metadata.pop(closed.rkey, None)


class NixlReader:
    """A ReadPort: reads from one peer at a time, by an agent of its own.

    An agent cannot take a read back: one that has some under way when it is closed goes with them.
    """

    def __init__(self, agent: NixlAgent, idle: Callable[["NixlReader"], None]) -> None:
        """`idle` is told when a closed reader may be used for another peer."""
        self._agent = agent
        self._idle = idle
        self.memory = AgentMemory(agent)
        self._peer: str | None = None
        self._known: set[bytes] = set()
        self._under_way: dict[int, NixlTransfer] = {}

    def __repr__(self) -> str:
        return f"NixlReader({self._peer}, {len(self._under_way)} under way)"

    def know(self, metadata: bytes) -> None:
        """Use what the peer said of its agent and memory. Raises DeviceError."""
        if metadata in self._known:
            return
        name = self._agent.add_peer(metadata)
        if self._peer not in (None, name):
            raise DeviceError("the peer's agent is another one now")
        self._peer = name
        self._known.add(metadata)

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        if self._peer is None:
            raise DeviceError("the peer's agent is not known yet")
        self._under_way[id] = self._agent.read(self._peer, local.address, remote.address, nbytes)

    def poll(self) -> Sequence[Completion]:
        ended = []
        for id, transfer in tuple(self._under_way.items()):
            try:
                if not transfer.has_ended():
                    continue
                ended.append(Completion(id, None))
            except DeviceError as error:
                return [*ended, Completion(id, str(error))]  # it stays under way: nobody knows
            del self._under_way[id]
        return ended

    def close(self) -> None:
        if not self._under_way and self._forget_peer():
            self._idle(self)
        else:
            self.destroy()

    def destroy(self) -> None:
        """The agent ends, whatever it does. Idempotent."""
        self._under_way.clear()
        self._agent.close()
        self.memory.registered.close()

    def _forget_peer(self) -> bool:
        """Whether the agent is as new."""
        peer, self._peer = self._peer, None
        self._known.clear()
        try:
            if peer is not None:
                self._agent.remove_peer(peer)
        except DeviceError:
            return False
        return True
