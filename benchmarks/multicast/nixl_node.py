"""Run a NIXL agent: `python -m benchmarks.multicast.nixl_node SOCKET RANK SIZE FOLDER`.

NIXL moves memory between two agents and has no broadcast: every target reads the whole image from rank 0,
which writes its descriptor to FOLDER.
"""

import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.multicast.messages import CastFinished
from benchmarks.multicast.rank import Bytes, serve_rank
from benchmarks.testbed.plan import INTERFACE

MEMORY = "DRAM"
_POLL_S = 0.0005


class NixlError(Exception):
    """A transfer failed."""


class NixlDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How to read rank 0's image."""

    metadata: bytes
    address: int
    nbytes: int


class NixlRank:
    """A rank that reads with the UCX backend over TCP."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # only installed where it is measured

        self._rank = rank
        self._size = size
        self._descriptor_file = folder / "nixl-offer"
        # Its progress thread would spin during others' turns; `cast` makes progress instead.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"rank-{rank}", config)
        self._registered: object = None

    @property
    def rank(self) -> int:
        return self._rank

    def allocate(self, nbytes: int) -> Bytes:
        image = np.empty(nbytes, np.uint8)
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._registered = self._agent.register_memory([(image.ctypes.data, nbytes, 0, "")], MEMORY)
        if self._rank == 0:
            metadata = self._agent.get_agent_metadata()
            descriptor = NixlDescriptor(metadata=metadata, address=image.ctypes.data, nbytes=nbytes)
            self._descriptor_file.write_bytes(msgspec.msgpack.encode(descriptor))
        return image

    def cast(self, image: Bytes) -> CastFinished:
        return self._read(image) if self._rank else self._serve_reads()

    def _serve_reads(self) -> CastFinished:
        """Make progress on reads over TCP until every target has sent its notification."""
        started_s, done = time.monotonic(), 0
        while done < self._size - 1:
            done += sum(len(notes) for notes in self._agent.get_new_notifs().values())
            time.sleep(_POLL_S)
        return CastFinished(started_s=started_s, ended_s=time.monotonic())

    def _read(self, image: Bytes) -> CastFinished:
        descriptor = msgspec.msgpack.decode(self._descriptor_file.read_bytes(), type=NixlDescriptor)
        source = self._agent.add_remote_agent(descriptor.metadata)
        here = self._agent.get_xfer_descs([(image.ctypes.data, image.nbytes, 0)], MEMORY)
        there = self._agent.get_xfer_descs([(descriptor.address, descriptor.nbytes, 0)], MEMORY)
        started_s = time.monotonic()
        handle = self._agent.initialize_xfer("READ", here, there, source, b"done")
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        ended_s = time.monotonic()
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise NixlError(f"the read ended as {state}")
        return CastFinished(started_s=started_s, ended_s=ended_s)


def main() -> None:
    path, rank, size, folder = sys.argv[1:]
    os.environ["UCX_TLS"] = "tcp"
    os.environ["UCX_NET_DEVICES"] = INTERFACE
    serve_rank(path, NixlRank(int(rank), int(size), Path(folder)))


if __name__ == "__main__":
    main()
