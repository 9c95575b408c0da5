"""The serving end of reads over shared memory: the path of a region's file."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

from rdmacast.errors import NotShared
from rdmacast.exporter import ExportedRange, StatelessExporter
from rdmacast.transports.shm.location import FileLocation

_CACHED_LOCATIONS = 256  # of regions: every read names one


class ShmExporter(StatelessExporter):
    """An Exporter of regions that have a file."""

    name = "shm"

    def __repr__(self) -> str:
        return "ShmExporter()"

    def export(self, exported: ExportedRange) -> AbstractContextManager[bytes]:
        """Name the file of the region. Raises NotShared if it has none."""
        path = exported.source.shm_path
        if not path:
            raise NotShared(f"region {exported.region} has no file behind it")
        # The file stays while the server holds its lease.
        return nullcontext(_location(exported.serial, exported.source.nbytes, path))


@lru_cache(_CACHED_LOCATIONS)
def _location(serial: int, nbytes: int, path: str) -> bytes:
    return FileLocation(serial=serial, nbytes=nbytes, path=path).encode()
