"""The serving end of reads over shared memory: the path of a region's file."""

from contextlib import AbstractContextManager, nullcontext

from rdmacast.errors import NotShared
from rdmacast.exporter import ExportedRange, StatelessExporter
from rdmacast.transports.shm.location import FileLocation


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
        location = FileLocation(serial=exported.serial, nbytes=exported.source.nbytes, path=path)
        return nullcontext(location.encode())  # the file stays while the server holds its lease
