"""A process with a NIXL agent: `python -m benchmarks.nixl_node SOCKET RANK SIZE FOLDER`.

NIXL moves memory from one agent to another and broadcasts nothing: every target reads all from rank 0, which
tells in FOLDER how it is reached and where its image is.
"""

import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.crew_member import Bytes, serve
from benchmarks.crew_messages import Done
from benchmarks.testbed_plan import INTERFACE

MEMORY = "DRAM"
_POLL_S = 0.0005


class NixlError(Exception):
    """A transfer failed."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells of its image."""

    metadata: bytes
    address: int
    nbytes: int


class NixlMember:
    """Reads with the backend UCX, which is held to TCP."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # of nobody who does not measure it

        self._rank = rank
        self._size = size
        self._offer = folder / "nixl-offer"
        # Its thread would spin, in the turns of others too: here `cast` makes the progress.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"rank-{rank}", config)
        self._registered: object = None

    @property
    def rank(self) -> int:
        return self._rank

    def room(self, nbytes: int) -> Bytes:
        image = np.empty(nbytes, np.uint8)
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._registered = self._agent.register_memory([(image.ctypes.data, nbytes, 0, "")], MEMORY)
        if self._rank == 0:
            metadata = self._agent.get_agent_metadata()
            offer = Offer(metadata=metadata, address=image.ctypes.data, nbytes=nbytes)
            self._offer.write_bytes(msgspec.msgpack.encode(offer))
        return image

    def cast(self, image: Bytes) -> Done:
        return self._read(image) if self._rank else self._give()

    def _give(self) -> Done:
        """Over TCP the giver takes part in reads, until all have told that they are done."""
        began_s, done = time.monotonic(), 0
        while done < self._size - 1:
            done += sum(len(told) for told in self._agent.get_new_notifs().values())
            time.sleep(_POLL_S)
        return Done(began_s=began_s, ended_s=time.monotonic())

    def _read(self, image: Bytes) -> Done:
        offer = msgspec.msgpack.decode(self._offer.read_bytes(), type=Offer)
        source = self._agent.add_remote_agent(offer.metadata)
        here = self._agent.get_xfer_descs([(image.ctypes.data, image.nbytes, 0)], MEMORY)
        there = self._agent.get_xfer_descs([(offer.address, offer.nbytes, 0)], MEMORY)
        began_s = time.monotonic()
        handle = self._agent.initialize_xfer("READ", here, there, source, b"done")
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        ended_s = time.monotonic()
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise NixlError(f"the read ended as {state}")
        return Done(began_s=began_s, ended_s=ended_s)


def main() -> None:
    path, rank, size, folder = sys.argv[1:]
    os.environ["UCX_TLS"] = "tcp"
    os.environ["UCX_NET_DEVICES"] = INTERFACE
    serve(path, NixlMember(int(rank), int(size), Path(folder)))


if __name__ == "__main__":
    main()
