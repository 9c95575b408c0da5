"""Connections to the master that Redis Sentinel names: `redis+sentinel://host:26379,host2:26379/name/db`."""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError, RedisError

SCHEME = "redis+sentinel"
PORT = 26379
# A sentinel that does not answer within this time is passed over.
ASK_TIMEOUT_S = 0.5

Address = tuple[str, int]


def parse_sentinel_url(url: str) -> dict[str, Any]:
    """Return the options of a MasterConnection, as redis-py's parse_url does. Raises ValueError."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    name, _, db = parts.path.removeprefix("/").partition("/")
    if not name or parse_qsl(parts.query):
        raise ValueError(f"use {SCHEME}://host:{PORT},host2:{PORT}/name, with the name of the master")
    options: dict[str, Any] = {"master": unquote(name), "db": int(db or 0)}
    options["sentinels"] = tuple(_address(host) for host in hosts.split(","))
    for option in ("username", "password"):
        if value := getattr(parts, option):
            options[option] = unquote(value)
    return options


def _address(text: str) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is not the address of a sentinel")
    return parts.hostname, parts.port or PORT


class MasterConnection(Connection):
    """A connection to the master of the moment; each new connection looks for it again."""

    def __init__(self, *, sentinels: tuple[Address, ...], master: str, **options: Any) -> None:
        super().__init__(**options)
        self._sentinels = sentinels
        self._master = master

    async def _connect(self) -> None:
        self.host, self.port = await find_master(self._sentinels, self._master)
        await super()._connect()


async def find_master(sentinels: tuple[Address, ...], master: str) -> Address:
    """Return the address of the master that the first sentinel to answer names. Raises ConnectionError."""
    reasons = []
    for host, port in sentinels:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                found = await _ask(host, port, master)
        except (RedisError, OSError) as error:
            reasons.append(f"{host}:{port}: {str(error) or 'no answer'}")
            continue
        if found is not None:
            return found
        reasons.append(f"{host}:{port} has no master {master!r}")
    raise ConnectionError(f"no sentinel names the master: {'; '.join(reasons)}")


async def _ask(host: str, port: int, master: str) -> Address | None:
    options: Mapping[str, Any] = {"protocol": 2, "driver_info": None}
    sentinel = Connection(host=host, port=port, **options)
    try:
        await sentinel.connect()
        await sentinel.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", master)
        reply = await sentinel.read_response(disable_decoding=True)
    finally:
        await sentinel.disconnect(nowait=True)
    return None if reply is None else (reply[0].decode(), int(reply[1]))
