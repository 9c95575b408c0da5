"""A rank of Open MPI, started by mpirun: `python -m benchmarks.mpi_node SOCKET`.

Calls the library itself, so that nothing but Open MPI needs to be installed.
"""

import ctypes
import sys
import time

import numpy as np

from benchmarks.crew_member import Bytes, serve
from benchmarks.crew_messages import Done

LIBRARY = "libmpi.so.40"  # Open MPI 4


class MpiError(Exception):
    """A call of MPI failed."""


class MpiMember:
    """Broadcasts with whatever algorithm mpirun was told to have used."""

    def __init__(self) -> None:
        # Its components look up the library's symbols among those of the whole process.
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

    def room(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def cast(self, image: Bytes) -> Done:
        buffer = ctypes.c_void_p(image.ctypes.data)
        self._call("MPI_Barrier", self._world)
        began_s = time.monotonic()
        self._call("MPI_Bcast", buffer, ctypes.c_int(image.nbytes), self._byte, ctypes.c_int(0), self._world)
        return Done(began_s=began_s, ended_s=time.monotonic())

    def finish(self) -> None:
        self._call("MPI_Finalize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._mpi, name)(*arguments)
        if code:
            raise MpiError(f"{name} failed with {code}")


def main() -> None:
    member = MpiMember()
    serve(sys.argv[1], member)
    member.finish()


if __name__ == "__main__":
    main()
