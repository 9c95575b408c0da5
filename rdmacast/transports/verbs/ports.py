"""The choice of the port and of its address to read over (pure)."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from rdmacast.errors import NoTransport

_V4_MAPPED = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's table of addresses. `is_routable`: RoCE version 2 (over UDP), or InfiniBand."""

    index: int
    value: bytes
    is_routable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of an RDMA device as its driver describes it."""

    device: str
    number: int
    is_active: bool
    is_ethernet: bool
    lid: int
    mtu_bytes: int
    gbit_s: float
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True, slots=True)
class PortChoice:
    """The port and the address of it that are used."""

    port: Port
    gid: Gid

    def __str__(self) -> str:
        kind = "RoCE" if self.port.is_ethernet else "InfiniBand"
        return f"{self.port.name} ({kind}, {self.port.gbit_s:g} Gbit/s, gid {gid_text(self.gid.value)})"


def pick(ports: Sequence[Port], wanted: str | None = None, address: str | None = None) -> PortChoice:
    """Return the best active port, or the one `wanted` as DEVICE or DEVICE:PORT. Raises NoTransport.

    The best one has the IP `address`, or else the highest rate.
    """
    named = [port for port in ports if wanted in (None, port.device, port.name)]
    if not named:
        there = ", ".join(port.name for port in ports) or "none at all"
        raise NoTransport(f"no RDMA port {wanted or ''} here: there is {there}".replace("  ", " "))
    usable = [port for port in named if port.is_active and any(map(_is_set, port.gids))]
    if not usable:
        states = ", ".join(
            f"{port.name} is {'without address' if port.is_active else 'down'}" for port in named
        )
        raise NoTransport(f"no RDMA port is usable: {states}")
    gid = _gid_of_ip(address)
    best = max(usable, key=lambda port: (any(g.value == gid for g in port.gids), port.gbit_s))
    return PortChoice(best, max(filter(_is_set, best.gids), key=lambda g: _rank(g, gid)))


def gid_text(value: bytes) -> str:
    address = ipaddress.IPv6Address(value)
    return str(address.ipv4_mapped or address)


def _rank(gid: Gid, wanted: bytes | None) -> tuple[bool, bool, bool, bool, int]:
    """Return the rank of a gid, larger is better; of equals the first is used."""
    return (
        gid.is_routable,
        gid.value == wanted,
        gid.value.startswith(_V4_MAPPED),
        not gid.value.startswith(_LINK_LOCAL),
        -gid.index,
    )


def _is_set(gid: Gid) -> bool:
    return any(gid.value)


def _gid_of_ip(address: str | None) -> bytes | None:
    try:
        ip = ipaddress.ip_address(address or "")
    except ValueError:
        return None  # a host name
    return ip.packed if ip.version == 6 else _V4_MAPPED + ip.packed
