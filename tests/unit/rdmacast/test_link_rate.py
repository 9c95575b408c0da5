"""The estimate of a link's rate, and the speed of ports."""

import socket
from pathlib import Path

import psutil
import pytest

from rdmacast.link_rate import LinkRate, interface_rate


def test_the_first_transfer_replaces_the_assumption_and_later_ones_weigh_half() -> None:
    rate = LinkRate()
    assert (rate.bytes_per_s, rate.samples) == (1.25e9, 0)
    rate = rate.observe(100.0)
    assert (rate.bytes_per_s, rate.samples) == (100.0, 1)
    assert rate.observe(200.0) == LinkRate(bytes_per_s=150.0, samples=2)


def test_the_speed_of_a_port_is_that_of_the_interface_with_its_address() -> None:
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for address in (one.address for one in addresses if one.family == socket.AF_INET):
            rate = interface_rate(address)
            is_device = Path("/sys/class/net", name, "device").exists()
            speed = stats[name].speed if is_device else 0
            assert (rate.bytes_per_s if rate else 0) == pytest.approx(speed * 1.25e5)


@pytest.mark.parametrize("host", ["192.0.2.1", "no host of this name"])
def test_the_speed_of_a_port_elsewhere_is_unknown(host: str) -> None:
    assert interface_rate(host) is None
