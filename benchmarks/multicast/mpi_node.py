"""Run a rank of Open MPI under mpirun: `python -m benchmarks.multicast.mpi_node SOCKET`.

Calls the library directly, so that only Open MPI itself needs to be installed.
"""

import ctypes
import sys
import time

import numpy as np

from benchmarks.multicast.messages import CastFinished
from benchmarks.multicast.rank import Bytes, serve_rank

LIBRARY = "libmpi.so.40"  # Open MPI 4


class MpiError(Exception):
    """An MPI call failed."""


class MpiRank:
    """A rank that broadcasts with the algorithm that mpirun selected."""

    def __init__(self) -> None:
        # Its components resolve the library's symbols globally.
        self._mpi = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        self._world = ctypes.byref(ctypes.c_char.in_dll(self._mpi, "ompi_mpi_comm_world"))
        self._byte = ctypes.byref(ctypes.c_char.in_dll(self._mpi, "ompi_mpi_byte"))
        self._call("MPI_Init", None, None)
        rank = ctypes.c_int()
        self._call("MPI_Comm_rank", self._world, ctypes.byref(rank))
        self._rank = rank.value

    @property
    def rank(self) -> int:
        return self._rank

    def allocate(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def cast(self, image: Bytes) -> CastFinished:
        buffer = ctypes.c_void_p(image.ctypes.data)
        self._call("MPI_Barrier", self._world)
        started_s = time.monotonic()
        self._call("MPI_Bcast", buffer, ctypes.c_int(image.nbytes), self._byte, ctypes.c_int(0), self._world)
        return CastFinished(started_s=started_s, ended_s=time.monotonic())

    def finish(self) -> None:
        self._call("MPI_Finalize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._mpi, name)(*arguments)
        if code:
            raise MpiError(f"{name} failed with {code}")


def main() -> None:
    member = MpiRank()
    serve_rank(sys.argv[1], member)
    member.finish()


if __name__ == "__main__":
    main()
