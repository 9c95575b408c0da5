"""The addresses that webhooks may go to: public ones, and those that the operator allows."""

import asyncio
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import httpcore2

from gateway.core.errors import Unprocessable
from registry.errors import InvalidRecord

# Ranges of IPv6 that lead to an IPv4 address, which may be a private one: translation, 6to4, Teredo.
_TUNNELS = tuple(map(ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))


class DestinationRefused(Exception):
    """A webhook would go where it must not."""


@dataclass(frozen=True, slots=True)
class HookDestinations:
    """The hosts and networks that the operator allows beside public addresses with HTTPS."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def check_url(self, url: str) -> None:
        """Raise DestinationRefused for a URL that can never be delivered to."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise DestinationRefused(f"it is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host or not url.isascii() or " " in url:
            raise DestinationRefused("it is not an http or https URL")
        if parts.username is not None or parts.password is not None:
            raise DestinationRefused("it has a user or a password")
        if _is_address(host):
            self.check_address(host, host)
        if parts.scheme == "http" and not self._names(host):
            raise DestinationRefused("it must be https: only hosts that the operator allows may use http")

    def check_address(self, host: str, address: str) -> None:
        """Raise DestinationRefused unless webhooks for `host` may go to this address."""
        if host.lower() in self.hosts:
            return
        found = ip_address(address.partition("%")[0])
        if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if any(found in network for network in self.networks if network.version == found.version):
            return
        tunnelled = any(found in network for network in _TUNNELS if network.version == found.version)
        if not found.is_global or found.is_multicast or tunnelled:
            raise DestinationRefused(f"{host} has the address {found}, which is not public")

    def _names(self, host: str) -> bool:
        """Return whether the operator named this host, or a network that has this address."""
        if host.lower() in self.hosts:
            return True
        return _is_address(host) and any(
            ip_address(host) in network
            for network in self.networks
            if network.version == ip_address(host).version
        )


def checked_webhook(url: str | None, destinations: HookDestinations) -> str:
    """Return the URL of a new webhook, empty for none. Raises Unprocessable for one that has no way."""
    if url is None:
        return ""
    try:
        destinations.check_url(url)
    except DestinationRefused as error:
        raise Unprocessable(f"webhooks cannot go there: {error}", param="webhook") from None
    return url


def parse_destinations(entries: Iterable[str]) -> HookDestinations:
    """Return the destinations of host names, addresses and networks. Raises InvalidRecord."""
    hosts, networks = set[str](), list[IPv4Network | IPv6Network]()
    for entry in filter(None, map(str.strip, entries)):
        try:
            networks.append(ip_network(entry))
        except ValueError as error:
            if "/" in entry or entry.replace(".", "").isdigit():
                raise InvalidRecord(f"{entry!r} is not a host or a network: {error}") from None
            hosts.add(entry.lower())
    return HookDestinations(frozenset(hosts), tuple(networks))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connections to addresses that were checked: a name is resolved once, and what it gave is dialled.

    So a name which changes its address between the check and the connection gains nothing.
    """

    def __init__(self, destinations: HookDestinations) -> None:
        self._destinations = destinations
        self._dialler = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of the host that answers. Raises DestinationRefused."""
        addresses = await _resolved(host, port)
        for address in addresses:
            self._destinations.check_address(host, address)
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._dialler.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


async def _resolved(host: str, port: int) -> Sequence[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from error
    return list(dict.fromkeys([str(address[0]) for *_, address in found]))[:4]
