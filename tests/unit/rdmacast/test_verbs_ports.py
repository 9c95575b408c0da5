"""Which RDMA port and address are taken."""

from ipaddress import ip_address

import pytest

from rdmacast.errors import NoTransport
from rdmacast.transports.verbs.ports import Gid, Port, pick


def gid(index: int, address: str, *, is_routable: bool = True) -> Gid:
    ip = ip_address(address)
    return Gid(index, ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed, is_routable)


def port(name: str, *gids: Gid, gbit_s: float = 100.0, is_active: bool = True) -> Port:
    device, _, number = name.partition(":")
    return Port(
        device=device,
        number=int(number or 1),
        is_active=is_active,
        is_ethernet=True,
        lid=0,
        mtu_bytes=4096,
        gbit_s=gbit_s,
        gids=gids,
    )


LINK = gid(0, "fe80::1")
OLD = gid(2, "10.0.0.1", is_routable=False)
NEW = gid(3, "10.0.0.1")
SIX = gid(4, "2001:db8::1")
OTHER = gid(5, "10.9.0.1")
UNSET = Gid(9, bytes(16), True)


def test_of_a_ports_addresses_a_routable_ipv4_one_is_taken() -> None:
    assert pick([port("a", LINK, OLD, NEW, SIX, OTHER, UNSET)]).gid == NEW
    assert pick([port("a", LINK, SIX)]).gid == SIX
    assert pick([port("a", UNSET, LINK)]).gid == LINK
    assert pick([port("a", LINK, NEW, OTHER)], address="10.9.0.1").gid == OTHER
    assert pick([port("a", LINK, NEW)], address="a-host-name").gid == NEW


def test_the_port_of_the_address_then_the_fastest() -> None:
    ports = [port("a", NEW), port("b", OTHER, gbit_s=400), port("c", SIX, gbit_s=800, is_active=False)]
    assert pick(ports).port.name == "b:1"
    assert pick(ports, address="10.0.0.1").port.name == "a:1"
    assert pick(ports, "a").port.name == "a:1"
    assert pick([port("m:1", NEW), port("m:2", OTHER)], "m:2").port.name == "m:2"
    assert str(pick(ports)) == "b:1 (RoCE, 400 Gbit/s, gid 10.9.0.1)"


def test_what_is_missing_is_said() -> None:
    with pytest.raises(NoTransport, match="there is none at all"):
        pick([])
    with pytest.raises(NoTransport, match="no RDMA port x here: there is a:1"):
        pick([port("a", NEW)], "x")
    with pytest.raises(NoTransport, match="a:1 is down, b:1 is without address"):
        pick([port("a", NEW, is_active=False), port("b", UNSET)])
