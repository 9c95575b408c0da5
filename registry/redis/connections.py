"""A bounded pool of Redis connections, in which no failure leaves a half-read connection.

A connection is used for one exchange at a time (commands out, all replies in). If the exchange fails - by a
network error, a timeout, a cancellation between any two bytes - the connection is closed, because its next
reply may belong to an earlier command. Closing does not suspend, so a second cancellation cannot interrupt
it.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from rdmacast.aio.time_limit import TimeLimit
from rdmacast.protocol.tls import TlsFiles, load_client
from registry.errors import InvalidRecord, StateFull, StateUnavailable
from registry.redis.sentinel import SCHEME, MasterConnection, parse_sentinel_url

Argument = str | bytes | int | float
Command = Sequence[Argument]

# The password of an embedded Redis, beside its socket: whoever may open the folder is its own user.
PASSWORD_FILE = "redis.password"
# An exchange that takes longer fails, so that requests notice a hanging Redis within seconds.
TIMEOUT_S = 2.0
# For this long replicas may take to acknowledge a record; less than an exchange may take.
WAIT_MS = 1000
# Pauses before the retries of an exchange that lost its connection. The first retry is immediate: most often
# the connection was an idle one that a restart of Redis had closed.
RETRY_PAUSES_S = (0.0, 0.05, 0.3)


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A Lua script, called by its SHA-1 digest."""

    source: str
    sha1: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha1", hashlib.sha1(self.source.encode()).hexdigest())


class DedicatedConnection:
    """A dedicated connection for one caller at a time, on which commands may block in Redis."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def run(self, *commands: Command, blocking_s: float = 0.0) -> list[Any]:
        """Return the reply of each command, possibly a ResponseError; `blocking_s` is their time to block."""
        timeout_s = self._timeout_s + blocking_s
        try:
            with TimeLimit(timeout_s):
                return await _exchange(self._connection, commands)
        except TimeoutError as error:
            raise _timed_out(timeout_s) from error


class ConnectionPool:
    """A pool of at most `limit` connections, and of additional dedicated ones."""

    def __init__(
        self,
        url: str,
        *,
        password: str = "",
        wait_replicas: int = 0,
        tls: TlsFiles | None = None,
        limit: int = 16,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._name = _without_secrets(url)
        self._make = _connection_factory(url, password, timeout_s, tls)
        self._timeout_s = timeout_s
        self._wait_replicas = wait_replicas
        self._limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[AbstractConnection] = []
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._idle)} idle of {self._limit}"
        return f"<ConnectionPool {self._name} {state}>"

    async def call(self, *command: Argument) -> Any:
        """Return the reply of one command."""
        return (await self.run(command))[0]

    async def run(self, *commands: Command) -> list[Any]:
        """Return the replies of several commands sent together. Raises StateUnavailable on any error.

        An exchange that lost its connection is retried: every write of the shared state is idempotent, so a
        write that was executed before the loss does no harm.
        """
        replies = await self._retrying(lambda: self._once(commands))
        for reply in replies:
            if isinstance(reply, RedisError):
                raise self._refused(reply) from reply
        return replies

    async def script(
        self, script: LuaScript, keys: Sequence[str], args: Sequence[Argument], *, replicated: bool = False
    ) -> Any:
        """Return the reply of a script, which is sent in full only if Redis does not have it cached.

        With `replicated` it returns once `wait_replicas` replicas have what the script wrote, now or when it
        was called before; otherwise it raises StateUnavailable.
        """
        wait = (("WAIT", self._wait_replicas, WAIT_MS),) if replicated and self._wait_replicas else ()

        async def once() -> Any:
            reply, *acked = await self._once([("EVALSHA", script.sha1, len(keys), *keys, *args), *wait])
            if isinstance(reply, NoScriptError):
                reply, *acked = await self._once([("EVAL", script.source, len(keys), *keys, *args), *wait])
            if acked and not isinstance(reply, RedisError):
                self._check_replicated(acked[0])
            return reply

        reply = await self._retrying(once)
        if isinstance(reply, RedisError):
            raise self._refused(reply) from reply
        return reply

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[DedicatedConnection]:
        """Open an additional connection for commands that block; close it at the end."""
        self._check_open()
        connection = self._make()
        try:
            yield DedicatedConnection(connection, self._timeout_s)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        finally:
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close idle connections now, and those in use when their exchange ends."""
        self._closed = True
        await self._close_idle()

    async def _once(self, commands: Sequence[Command]) -> list[Any]:
        self._check_open()
        try:
            with TimeLimit(self._timeout_s):
                async with self._slots:
                    return await self._on_connection(commands)
        except TimeoutError as error:
            await self._close_idle()  # to the same Redis, which hangs; Sentinel may name another by now
            raise _timed_out(self._timeout_s) from error

    async def _on_connection(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._idle.pop() if self._idle else self._make()
        was_connected, intact = connection.is_connected, False
        try:
            replies = await _exchange(connection, commands)
            intact = True
            return replies
        except (ConnectionError, OSError):
            if was_connected:
                # A restart of Redis ends all connections: the idle ones would fail one by one. A failure to
                # make a new one (its name is not resolved for a moment) says nothing about them.
                await self._close_idle()
            raise
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
                await asyncio.sleep(pause_s)
            except RedisError as error:
                raise self._unavailable(error) from error
        try:
            return await exchange()
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> StateUnavailable:
        return StateUnavailable(f"Redis at {self._name}: {error}")

    def _check_replicated(self, acked: int | RedisError) -> None:
        if isinstance(acked, RedisError):
            raise self._refused(acked) from acked
        if acked < self._wait_replicas:
            raise StateUnavailable(
                f"{acked} replicas of Redis at {self._name} acknowledged a record, not {self._wait_replicas}"
            )

    def _refused(self, reply: RedisError) -> StateUnavailable:
        if "command not allowed when used memory" in str(reply):  # redis-py removes the code OOM
            return StateFull(f"Redis at {self._name} is full: archive usage or raise its maxmemory")
        return StateUnavailable(f"Redis at {self._name} refused: {reply}")

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
    """Encode commands in the Redis protocol, at a third of the cost of redis-py."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d" % len(command))
        for argument in command:
            raw = argument if isinstance(argument, bytes) else str(argument).encode()
            parts += (b"$%d" % len(raw), raw)
    parts.append(b"")
    return [b"\r\n".join(parts)]


async def _read(connection: AbstractConnection) -> Any:
    # An error reply is returned as a value, so that the replies after it are read as well.
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        if "READONLY" in str(error) or isinstance(error, ReadOnlyError):
            raise ConnectionError("the master has become a replica") from error
        return error


def _timed_out(seconds: float) -> StateUnavailable:
    return StateUnavailable(f"Redis did not answer within {seconds:g} s")


def _connection_factory(
    url: str, password: str, timeout_s: float, tls: TlsFiles | None = None
) -> Callable[[], AbstractConnection]:
    """Return a factory of connections. Raises InvalidRecord for an invalid Redis URL.

    A password in the URL has precedence over that of an embedded Redis, and that over `password`.
    """
    name = _without_secrets(url)
    try:
        options: dict[str, Any]
        if url.startswith(f"{SCHEME}://"):
            options = {**parse_sentinel_url(url), "connection_class": MasterConnection}
        else:
            options = dict(parse_url(url))
        kind = options.pop("connection_class", Connection)
        if kind is UnixDomainSocketConnection:
            if not options.get("path"):
                raise ValueError("the socket path is missing, use for example unix:///run/redis.sock")
        else:
            options["socket_keepalive"] = True
        known = options.get("password") or _password_beside(options.get("path", "")) or password
        if known:
            options["password"] = known
        options |= {
            "protocol": 2,  # replies as plain lists, as all callers expect
            "driver_info": None,
            "socket_timeout": None,  # each exchange has its own deadline instead
            # Half of an exchange's: one that takes longer finds connections that hang, not one to be made.
            "socket_connect_timeout": timeout_s / 2,
        }
        if refused := [option for option in options if option.startswith("ssl_")]:
            raise ValueError(f"not {', '.join(refused)} but --redis-ca, --redis-cert and --redis-key")
        kind(**options)
    except (TypeError, ValueError) as error:
        raise InvalidRecord(f"invalid Redis URL {name!r}: {error}") from error
    if not issubclass(kind, SSLConnection):
        if tls is not None:
            raise InvalidRecord(f"TLS to Redis needs a rediss:// URL, not {name!r}")
        return lambda: kind(**options)
    try:
        context = load_client(tls or TlsFiles())
    except OSError as error:
        raise InvalidRecord(f"TLS for Redis by {tls}: {error.strerror or error}") from error

    def make() -> AbstractConnection:
        connection = kind(**options)
        connection.ssl_context.context = context  # instead of one that also trusts the system's authorities
        return connection

    return make


def _password_beside(socket_path: str) -> str:
    """Return the password of the embedded Redis with this socket, "" if there is none or it is unreadable."""
    try:
        return Path(socket_path).with_name(PASSWORD_FILE).read_text().strip() if socket_path else ""
    except OSError:
        return ""


def _without_secrets(url: str) -> str:
    """Return the URL for messages, without user, password and query."""
    return re.sub(r"//.*@", "//…@", url.partition("?")[0])
