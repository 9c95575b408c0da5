"""A transport that writes once a turn of the loop: the head and the body of an answer leave in one piece."""

import asyncio
from typing import Any

_MOST_BYTES = 16 << 10


class CorkedTransport:
    """Collects what is written until the turn ends (or it is much) and passes all else through."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._nbytes = 0

    def __repr__(self) -> str:
        return f"<CorkedTransport {self._nbytes} bytes, {self._transport!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._nbytes += len(data)
        if self._nbytes >= _MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is collected, unless the connection was lost meanwhile: uvloop raises then."""
        if self._parts:
            parts, self._parts, self._nbytes = self._parts, [], 0
            if self._transport.is_closing():
                return
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        self.flush()
        self._transport.close()
