"""The fake of the NIXL seam: agents of one process that copy memory, with faults on demand."""

import ctypes
import itertools
import json

from rdmacast.errors import DeviceError


class MemoryNixl:
    """A NixlDriver and the network of its agents. `held`: no read ends; `cut`: every read fails."""

    def __init__(self) -> None:
        self.agents: dict[str, MemoryAgent] = {}
        self.numbers = itertools.count(1)
        self.held = False
        self.cut = False

    def agent(self) -> "MemoryAgent":
        made = MemoryAgent(self, f"agent-{next(self.numbers)}")
        self.agents[made.name] = made
        return made


class MemoryAgent:
    """A NixlAgent whose reads progress, as over TCP, only while the other agent makes progress, too."""

    def __init__(self, network: MemoryNixl, name: str) -> None:
        self.network = network
        self.name = name
        self.memory: set[tuple[int, int]] = set()
        self.known: dict[str, set[tuple[int, int]]] = {}  # by peer: its memory in loaded metadata
        self.answered = 0

    def register(self, address: int, nbytes: int) -> bytes:
        self._check_open()
        self.memory.add((address, nbytes))
        return json.dumps([self.name, address, nbytes]).encode()

    def deregister(self, address: int, nbytes: int) -> None:
        self.memory.discard((address, nbytes))

    def add_peer(self, metadata: bytes) -> str:
        self._check_open()
        try:
            name, address, nbytes = json.loads(metadata)
        except ValueError as error:
            raise DeviceError(f"not an agent's metadata: {error}") from error
        self.known.setdefault(name, set()).add((address, nbytes))
        return str(name)

    def remove_peer(self, name: str) -> None:
        del self.known[name]

    def read(self, peer: str, target: int, source: int, nbytes: int) -> "MemoryTransfer":
        self._check_open()
        if not covers(self.known[peer], source, nbytes) or not covers(self.memory, target, nbytes):
            raise DeviceError("memory is not registered")
        return MemoryTransfer(self, peer, (target, source, nbytes))

    def progress(self) -> None:
        self.answered += 1

    def close(self) -> None:
        self.memory.clear()
        self.network.agents.pop(self.name, None)

    def _check_open(self) -> None:
        if self.network.agents.get(self.name) is not self:
            raise DeviceError("the agent is closed")


class MemoryTransfer:
    """A NixlTransfer."""

    def __init__(self, agent: MemoryAgent, peer: str, copy: tuple[int, int, int]) -> None:
        self._agent = agent
        self._peer = agent.network.agents.get(peer)
        self._copy = copy
        self._began = self._peer.answered if self._peer is not None else 0

    def has_ended(self) -> bool:
        target, source, nbytes = self._copy
        network = self._agent.network
        if network.cut or self._peer is None or self._peer.name not in network.agents:
            raise DeviceError("the peer does not answer")
        if network.held or self._peer.answered == self._began:
            return False
        if not covers(self._peer.memory, source, nbytes):
            raise DeviceError("the peer refuses access to that memory")
        if not covers(self._agent.memory, target, nbytes):
            raise DeviceError("our own memory is not registered")
        ctypes.memmove(target, source, nbytes)
        return True


def covers(memory: set[tuple[int, int]], start: int, nbytes: int) -> bool:
    return any(address <= start and start + nbytes <= address + registered for address, registered in memory)
