"""The payload of the shared-memory transport: the file behind a region (pure)."""

import struct
from dataclasses import dataclass

from rdmacast.errors import ProtocolError

MAX_PATH_BYTES = 4096

_HEAD = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLocation:
    """The file of a region of `nbytes`; `serial` differs between publications of one name."""

    serial: int
    nbytes: int
    path: str

    def encode(self) -> bytes:
        """Return at most 16 + MAX_PATH_BYTES bytes. Raises ProtocolError if the path is longer."""
        path = self.path.encode()
        if not 1 <= len(path) <= MAX_PATH_BYTES:
            raise ProtocolError(f"a path of {len(path)} bytes cannot be sent")
        return _HEAD.pack(self.serial, self.nbytes) + path

    @classmethod
    def decode(cls, data: bytes) -> "FileLocation":
        """Read what `encode` returned. Raises ProtocolError."""
        if not 1 <= len(data) - _HEAD.size <= MAX_PATH_BYTES:
            raise ProtocolError(f"the location of a region's file has {len(data)} bytes")
        serial, nbytes = _HEAD.unpack_from(data)
        try:
            path = data[_HEAD.size :].decode()
        except UnicodeDecodeError:
            raise ProtocolError("the path of a region's file is not UTF-8") from None
        if "\0" in path:
            raise ProtocolError("the path of a region's file holds a zero byte")
        return cls(serial=serial, nbytes=nbytes, path=path)
