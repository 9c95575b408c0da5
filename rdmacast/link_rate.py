"""The estimated rate of a link, from which plans and K/V transfers predict durations."""

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_WEIGHT = 0.5  # of the latest transfer against all earlier ones
_MBIT_BYTES = 1.25e5
_INTERFACES = Path("/sys/class/net")  # those of devices have a link to theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The rate of a link as `samples` transfers measured it; without samples it is assumed.

    The default is that of a link of which nothing is known: 10 Gbit/s.
    """

    bytes_per_s: float = 1.25e9
    samples: int = 0

    def observe(self, bytes_per_s: float) -> "LinkRate":
        """Return the estimate after another transfer; the first one replaces what was assumed."""
        weight = _WEIGHT if self.samples else 1.0
        rate = self.bytes_per_s + weight * (bytes_per_s - self.bytes_per_s)
        return LinkRate(bytes_per_s=rate, samples=self.samples + 1)


def interface_rate(host: str) -> LinkRate | None:
    """Return the speed of the network interface with this address or host name; None if it is unknown.

    Virtual interfaces report speeds that are not theirs: a veth pair 10 Gbit/s, a tunnel 10 Mbit/s.
    """
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        mbit_s = stats[name].speed if name in stats and (_INTERFACES / name / "device").exists() else 0
        if mbit_s > 0 and any(one.address in wanted for one in addresses):
            return LinkRate(bytes_per_s=mbit_s * _MBIT_BYTES)
    return None
