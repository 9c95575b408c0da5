"""A bounded set of Redis connections, where no failure leaves a half-read one behind.

A connection is lent to one exchange (commands out, all replies in). If the exchange does not end
well - an error of the network, a timeout, a cancellation between any two bytes - the connection is
closed, because its next reply may be an answer to somebody else's question. Closing does not
suspend, so that a second cancellation cannot interrupt it.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from registry.errors import InvalidRecord, StateUnavailable
from registry.time_limit import TimeLimit

Argument = str | bytes | int | float
Command = Sequence[Argument]

# An exchange that takes longer has met a Redis that hangs: requests hear so within a second or two.
TIMEOUT_S = 2.0
# Pauses before the second, third, … try of an exchange that lost its connection. The second comes
# at once: most often it was an idle connection that a restart of Redis had ended.
RETRY_PAUSES_S = (0.0, 0.05, 0.3)
# An idle connection is asked whether it still lives after this long (a cut cable says nothing).
HEALTH_CHECK_S = 30


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, called by its digest."""

    source: str
    sha1: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha1", hashlib.sha1(self.source.encode()).hexdigest())


class Exchange:
    """A dedicated connection: one caller at a time, who may wait in Redis for something to happen."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def run(self, *commands: Command, blocking_s: float = 0.0) -> list[Any]:
        """The reply of each command; it may be a ResponseError. `blocking_s`: what they wait in Redis."""
        timeout_s = self._timeout_s + blocking_s
        try:
            with TimeLimit(timeout_s):
                return await _exchange(self._connection, commands)
        except TimeoutError as error:
            raise _silent(timeout_s) from error


class Connections:
    """Runs commands on at most `limit` connections, and on dedicated ones beside them."""

    def __init__(self, url: str, *, limit: int = 16, timeout_s: float = TIMEOUT_S) -> None:
        self._name = _without_secrets(url)
        self._make = _maker(url, timeout_s)
        self._timeout_s = timeout_s
        self._limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[AbstractConnection] = []
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._idle)} idle of {self._limit}"
        return f"<Connections {self._name} {state}>"

    async def call(self, *command: Argument) -> Any:
        """The reply of one command."""
        return (await self.run(command))[0]

    async def run(self, *commands: Command) -> list[Any]:
        """The replies of several commands sent at once; the first error among them is raised.

        An exchange that lost its connection is tried again: every write of the shared state is
        idempotent, so that it does no harm if the lost one was carried out.
        """
        replies = await self._retrying(lambda: self._once(commands))
        for reply in replies:
            if isinstance(reply, RedisError):
                raise StateUnavailable(f"Redis at {self._name} refused: {reply}") from reply
        return replies

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """The reply of a script, which is sent in full only where Redis does not know it yet."""

        async def once() -> Any:
            reply = (await self._once([("EVALSHA", script.sha1, len(keys), *keys, *args)]))[0]
            if isinstance(reply, NoScriptError):
                reply = (await self._once([("EVAL", script.source, len(keys), *keys, *args)]))[0]
            return reply

        reply = await self._retrying(once)
        if isinstance(reply, RedisError):
            raise StateUnavailable(f"Redis at {self._name} refused: {reply}") from reply
        return reply

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[Exchange]:
        """A connection beside the bounded ones, for commands that block; closed at the end."""
        self._check_open()
        connection = self._make()
        try:
            yield Exchange(connection, self._timeout_s)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        finally:
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close what is idle now, and what is in use when its exchange ends."""
        self._closed = True
        await self._close_idle()

    async def _once(self, commands: Sequence[Command]) -> list[Any]:
        self._check_open()
        try:
            with TimeLimit(self._timeout_s):
                async with self._slots:
                    return await self._lent(commands)
        except TimeoutError as error:
            raise _silent(self._timeout_s) from error

    async def _lent(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._idle.pop() if self._idle else self._make()
        intact = False
        try:
            replies = await _exchange(connection, commands)
            intact = True
            return replies
        finally:
            if intact and not self._closed:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)

    async def _retrying(self, exchange: Callable[[], Awaitable[Any]]) -> Any:
        for pause_s in RETRY_PAUSES_S:
            try:
                return await exchange()
            except AuthenticationError as error:
                raise self._unavailable(error) from error
            except (ConnectionError, OSError):
                # A restart of Redis ends all connections: the idle ones would fail one by one.
                await self._close_idle()
            except RedisError as error:
                raise self._unavailable(error) from error
            await asyncio.sleep(pause_s)
        try:
            return await exchange()
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> StateUnavailable:
        return StateUnavailable(f"Redis at {self._name}: {error}")

    async def _close_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StateUnavailable(f"the connections to Redis at {self._name} are closed")


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    if not connection.is_connected:
        await connection.connect()
    await connection.send_packed_command(_packed(commands))
    return [await _read(connection) for _ in commands]


def _packed(commands: Sequence[Command]) -> list[bytes]:
    """The commands as Redis reads them; what redis-py does, for a third of the price."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d" % len(command))
        for argument in command:
            raw = argument if isinstance(argument, bytes) else str(argument).encode()
            parts += (b"$%d" % len(raw), raw)
    parts.append(b"")
    return [b"\r\n".join(parts)]


async def _read(connection: AbstractConnection) -> Any:
    # An error reply is a value here: the replies after it have to be read as well.
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def _silent(seconds: float) -> StateUnavailable:
    return StateUnavailable(f"Redis did not answer within {seconds:g} s")


def _maker(url: str, timeout_s: float) -> Callable[[], AbstractConnection]:
    """What makes one connection. Raises InvalidRecord for a URL that cannot be one of Redis."""
    name = _without_secrets(url)
    try:
        options: dict[str, Any] = dict(parse_url(url))
        kind = options.pop("connection_class", Connection)
        if kind is UnixDomainSocketConnection:
            if not options.get("path"):
                raise ValueError("it names no socket, as in unix:///run/redis.sock")
        else:
            options["socket_keepalive"] = True
        options |= {
            "protocol": 2,  # replies as plain lists, which is all that the parts above expect
            "driver_info": None,
            "socket_timeout": None,  # an exchange has one deadline of its own instead
            "socket_connect_timeout": timeout_s,
            "health_check_interval": HEALTH_CHECK_S,
        }
        kind(**options)
    except (TypeError, ValueError) as error:
        raise InvalidRecord(f"bad Redis URL {name!r}: {error}") from error
    return lambda: kind(**options)


def _without_secrets(url: str) -> str:
    """The URL for messages: no user, password or query."""
    return re.sub(r"//.*@", "//…@", url.partition("?")[0])
