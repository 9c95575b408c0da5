"""Addresses of the form `tcp://host:port`."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP address; port 0 lets the system choose when listening."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_url(url: str) -> TcpAddress:
    """Parse `tcp://host:port`. Raises ValueError, which names what is wrong with it."""
    parts = urlsplit(url)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None or parts.path not in ("", "/"):
        raise ValueError(f"bad address {url!r}: use tcp://host:port")
    return TcpAddress(parts.hostname, parts.port)
