"""Which namespaces, links and addresses a testbed has, and the commands that make them (pure).

One namespace is the switch: for each host it has the end of a veth pair, between which it bridges, or routes
where links have bands: a bridge forgets on the way how urgent a packet is, a router reads it from its header.
Nothing is added to the machine's own namespace, and nothing leads out of a testbed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from benchmarks.owner import Owner

MOST_HOSTS = 250
INTERFACE = "eth0"
_BRIDGE = "br0"
_ROUTER = "10.77.255.254"
_BAND_PACKETS = 64

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """How every host's link is shaped, each way; `shares` gives hosts whose link has a part of the rate.

    A small burst or MTU splits every large segment, and the processor becomes the limit. With `bands` what
    hosts send as urgent does not wait behind the rest, neither there nor at the switch, and the rest goes in
    segments of one MTU: where rates are scaled down far, a few large ones take as long as many steps of a
    model.
    """

    rate_bytes_s: int
    burst_bytes: int = 512 << 10
    queue_ms: int = 50
    mtu: int = 9000
    congestion: str = "cubic"
    bands: bool = False
    shares: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.rate_bytes_s < 1:
            raise ValueError(f"a link's rate must be above 0, not {self.rate_bytes_s} bytes a second")
        if not all(0 < share <= 1 for share in self.shares.values()):
            raise ValueError("a link's share of the rate must be above 0 and at most 1")

    def rate_bit_s(self, host: int) -> int:
        return int(self.rate_bytes_s * self.shares.get(host, 1.0)) * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedPlan:
    """`hosts` hosts, numbered from 0, around one switch."""

    hosts: int
    shape: LinkShape
    owner: Owner

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise ValueError(f"a testbed has 1 to {MOST_HOSTS} hosts, not {self.hosts}")

    @property
    def switch(self) -> str:
        return self.owner.name("switch")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Of all hosts, then of the switch."""
        return (*(self.namespace(host) for host in range(self.hosts)), self.switch)

    def namespace(self, host: int) -> str:
        self._check(host)
        return self.owner.name(f"h{host}")

    def address(self, host: int) -> str:
        self._check(host)
        return f"10.77.0.{host + 1}"

    def commands(self) -> list[Command]:
        """What makes the testbed, in order."""
        added: Command = ("ip", "netns", "add", self.switch)
        return [added, *self._switched(), *(one for host in range(self.hosts) for one in self._host(host))]

    def cut(self, host: int) -> Command:
        """What takes a host's link down, at the switch: the host lives on, and nobody hears of it."""
        self._check(host)
        return ("ip", "-n", self.switch, "link", "set", self._port(host), "down")

    def sent_bytes(self, host: int) -> Command:
        """What tells in JSON, among other things, what came from a host over its link."""
        self._check(host)
        return ("ip", "-n", self.switch, "-s", "-j", "link", "show", "dev", self._port(host))

    def _port(self, host: int) -> str:
        return f"p{host}"

    def _switched(self) -> list[Command]:
        """What the switch has besides its ports."""
        switch = ("ip", "-n", self.switch)
        if self.shape.bands:
            routing = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            return [("ip", "netns", "exec", self.switch, "sh", "-c", routing)]
        return [
            (*switch, "link", "add", _BRIDGE, "mtu", str(self.shape.mtu), "type", "bridge"),
            (*switch, "link", "set", _BRIDGE, "up"),
        ]

    def _host(self, host: int) -> list[Command]:
        name, port, mtu = self.namespace(host), self._port(host), ("mtu", str(self.shape.mtu))
        switch, own = ("ip", "-n", self.switch), ("ip", "-n", name)
        pair = ("type", "veth", "peer", "name", INTERFACE, *mtu, "netns", name)
        made: list[Command] = [
            ("ip", "netns", "add", name),
            (*switch, "link", "add", port, *mtu, *pair),
        ]
        via: Command = ()
        if self.shape.bands:
            via = ("via", _ROUTER)
            joined: list[Command] = [
                (*switch, "link", "set", port, "up"),
                (*switch, "address", "add", f"{_ROUTER}/32", "dev", port),
                (*switch, "route", "add", f"{self.address(host)}/32", "dev", port),
                (*own, "address", "add", f"{self.address(host)}/32", "dev", INTERFACE),
                (*own, "link", "set", INTERFACE, "up"),
                (*own, "route", "add", f"{_ROUTER}/32", "dev", INTERFACE),
            ]
        else:
            joined = [
                (*switch, "link", "set", port, "master", _BRIDGE, "up"),
                (*own, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE),
                (*own, "link", "set", INTERFACE, "up"),
            ]
        route = ("10.77.0.0/24", *via, "dev", INTERFACE, "src", self.address(host))
        return [
            *made,
            *joined,
            (*own, "link", "set", "lo", "up"),
            # By the route: a namespace may not have a default that the machine does not allow to everybody.
            (*own, "route", "replace", *route, "congctl", self.shape.congestion),
            *self._shaped(name, INTERFACE, host),
            *self._shaped(self.switch, port, host),
        ]

    def _shaped(self, namespace: str, device: str, host: int) -> list[Command]:
        shape = self.shape
        limits = ("rate", f"{shape.rate_bit_s(host)}bit", "burst", f"{shape.burst_bytes}b")
        queue = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
        shaped: Command = (*queue, "root", "handle", "1:", "tbf", *limits, "latency", f"{shape.queue_ms}ms")
        if not shape.bands:
            return [shaped]
        limited = ("gso_max_segs", "1", "txqueuelen", str(_BAND_PACKETS))
        return [
            ("ip", "-n", namespace, "link", "set", device, *limited),
            shaped,
            (*queue, "parent", "1:1", "pfifo_fast"),
        ]

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"there is no host {host}: the testbed has {self.hosts}, numbered from 0")
