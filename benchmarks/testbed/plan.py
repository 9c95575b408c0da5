"""The namespaces, links and addresses of a testbed, and the commands that make them (pure).

One namespace is the switch: it has one end of each host's veth pair and bridges between them, or routes where
links have bands, because a bridge loses a packet's priority while a router reads it from the header. Nothing
is added to the machine's own namespace, and no route leads out of a testbed. With a spine the switch is
several bridges, one a leaf, each with an uplink to a bridge between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from benchmarks.harness.owner import Owner

MAX_HOSTS = 250
INTERFACE = "eth0"
_BRIDGE = "br0"
_SPINE = "spine"
_ROUTER = "10.77.255.254"
_BANDS = "pfifo_fast"  # urgent, usual and bulk packets, by their priority
_BAND_PACKETS = 64

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """The shape of every host's link, each way; `shares` assigns hosts a fraction of the rate.

    A small burst or MTU splits large segments, and the processor becomes the limit. With `bands`, packets
    that hosts mark as urgent overtake others, and all others those marked as bulk, at the host and at the
    switch, and packets are limited to one MTU: at scaled-down rates a few large segments take as long as many
    steps of a model.
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
            raise ValueError(f"a link's rate must be above 0, not {self.rate_bytes_s} bytes/s")
        if not all(0 < share <= 1 for share in self.shares.values()):
            raise ValueError("a link's share of the rate must be above 0 and at most 1")

    def rate_bit_s(self, host: int) -> int:
        return int(self.rate_bytes_s * self.shares.get(host, 1.0)) * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Spine:
    """Leaf switches, and the rate of the uplink of each, each way; `leaf_of` has the leaf of each host."""

    leaf_of: tuple[int, ...]
    rate_bytes_s: int

    def __post_init__(self) -> None:
        if set(self.leaf_of) != set(range(self.leaves)):
            raise ValueError(f"each of the leaves 0 to {self.leaves - 1} needs a host")
        if self.rate_bytes_s < 1:
            raise ValueError(f"an uplink's rate must be above 0, not {self.rate_bytes_s} bytes/s")

    @property
    def leaves(self) -> int:
        return max(self.leaf_of, default=-1) + 1

    def uplink(self, leaf: int) -> str:
        """Return the name of a leaf's interface to the spine."""
        return f"up{leaf}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedPlan:
    """`hosts` hosts, numbered from 0, around one switch, or under the leaf switches of a `spine`."""

    hosts: int
    shape: LinkShape
    owner: Owner
    spine: Spine | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"a testbed has 1 to {MAX_HOSTS} hosts, not {self.hosts}")
        if self.spine is not None and len(self.spine.leaf_of) != self.hosts:
            raise ValueError(f"{len(self.spine.leaf_of)} hosts have a leaf, of {self.hosts}")
        if self.spine is not None and self.shape.bands:
            raise ValueError("a switch with bands has no spine")

    @property
    def switch(self) -> str:
        return self.owner.name("switch")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces of all hosts, then the switch's."""
        return (*(self.namespace(host) for host in range(self.hosts)), self.switch)

    def namespace(self, host: int) -> str:
        self._check(host)
        return self.owner.name(f"h{host}")

    def address(self, host: int) -> str:
        self._check(host)
        return f"10.77.0.{host + 1}"

    def commands(self) -> list[Command]:
        """Return the commands that make the testbed, in order."""
        added: Command = ("ip", "netns", "add", self.switch)
        return [added, *self._switched(), *(one for host in range(self.hosts) for one in self._host(host))]

    def cut(self, host: int) -> Command:
        """Return the command that takes a host's link down at the switch, unnoticed by the host."""
        self._check(host)
        return ("ip", "-n", self.switch, "link", "set", self.port(host), "down")

    def sent_bytes(self, host: int) -> Command:
        """Return the command that prints, in JSON, the byte counters of a host's link."""
        self._check(host)
        return ("ip", "-n", self.switch, "-s", "-j", "link", "show", "dev", self.port(host))

    def port(self, host: int) -> str:
        """Return the name of the switch's interface to a host."""
        return f"p{host}"

    def spine_bytes(self) -> list[Command]:
        """Return the commands that print, in JSON, the byte counters of each leaf's uplink."""
        spine = self.spine
        names = [] if spine is None else [spine.uplink(leaf) for leaf in range(spine.leaves)]
        return [("ip", "-n", self.switch, "-s", "-j", "link", "show", "dev", name) for name in names]

    def set_bands(self, apart: bool) -> list[Command]:
        """Return the commands that give the packets of all links their bands, or one queue."""
        if not self.shape.bands:
            raise ValueError("the links of this testbed have no bands")
        queue = (_BANDS,) if apart else ("pfifo", "limit", str(_BAND_PACKETS))
        ends = [(self.namespace(host), INTERFACE) for host in range(self.hosts)]
        ends += [(self.switch, self.port(host)) for host in range(self.hosts)]
        change = ("qdisc", "replace", "dev")
        return [("tc", "-n", name, *change, device, "parent", "1:1", *queue) for name, device in ends]

    def _switched(self) -> list[Command]:
        """Return the commands for the switch itself."""
        if self.shape.bands:
            routing = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            return [("ip", "netns", "exec", self.switch, "sh", "-c", routing)]
        if self.spine is None:
            return self._bridge(_BRIDGE)
        leaves = [one for leaf in range(self.spine.leaves) for one in self._leaf(self.spine, leaf)]
        return [*self._bridge(_SPINE), *leaves]

    def _bridge(self, name: str) -> list[Command]:
        switch = ("ip", "-n", self.switch)
        return [
            (*switch, "link", "add", name, "mtu", str(self.shape.mtu), "type", "bridge"),
            (*switch, "link", "set", name, "up"),
        ]

    def _leaf(self, spine: Spine, leaf: int) -> list[Command]:
        """Return the commands for a leaf switch and its uplink, which is shaped at both ends."""
        switch, mtu = ("ip", "-n", self.switch), ("mtu", str(self.shape.mtu))
        up, down = spine.uplink(leaf), f"down{leaf}"
        return [
            *self._bridge(f"br{leaf}"),
            (*switch, "link", "add", up, *mtu, "type", "veth", "peer", "name", down, *mtu),
            (*switch, "link", "set", up, "master", f"br{leaf}", "up"),
            (*switch, "link", "set", down, "master", _SPINE, "up"),
            *(self._limited(self.switch, end, spine.rate_bytes_s * 8) for end in (up, down)),
        ]

    def _host(self, host: int) -> list[Command]:
        name, port, mtu = self.namespace(host), self.port(host), ("mtu", str(self.shape.mtu))
        switch, own = ("ip", "-n", self.switch), ("ip", "-n", name)
        pair = ("type", "veth", "peer", "name", INTERFACE, *mtu, "netns", name)
        made: list[Command] = [("ip", "netns", "add", name), (*switch, "link", "add", port, *mtu, *pair)]
        via: Command = ()
        bridge = _BRIDGE if self.spine is None else f"br{self.spine.leaf_of[host]}"
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
                (*switch, "link", "set", port, "master", bridge, "up"),
                (*own, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE),
                (*own, "link", "set", INTERFACE, "up"),
            ]
        route = ("10.77.0.0/24", *via, "dev", INTERFACE, "src", self.address(host))
        return [
            *made,
            *joined,
            (*own, "link", "set", "lo", "up"),
            # Per route: a namespace may only default to congestion controls that the machine allows to all.
            (*own, "route", "replace", *route, "congctl", self.shape.congestion),
            *self._shaped(name, INTERFACE, host),
            *self._shaped(self.switch, port, host),
        ]

    def _shaped(self, namespace: str, device: str, host: int) -> list[Command]:
        shaped = self._limited(namespace, device, self.shape.rate_bit_s(host))
        if not self.shape.bands:
            return [shaped]
        queue = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
        limited = ("gso_max_segs", "1", "txqueuelen", str(_BAND_PACKETS))
        return [
            ("ip", "-n", namespace, "link", "set", device, *limited),
            shaped,
            (*queue, "parent", "1:1", _BANDS),
        ]

    def _limited(self, namespace: str, device: str, rate_bit_s: int) -> Command:
        """Return the command that limits what a device sends."""
        shape = self.shape
        limits = ("rate", f"{rate_bit_s}bit", "burst", f"{shape.burst_bytes}b")
        queue = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
        return (*queue, "root", "handle", "1:", "tbf", *limits, "latency", f"{shape.queue_ms}ms")

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host} does not exist: the testbed has hosts 0 to {self.hosts - 1}")
