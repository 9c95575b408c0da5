"""The cluster followed in a thread: what `top` shows, and what `--watch` waits for."""

import json
import threading
from types import TracebackType
from typing import Self

import httpx2

from cli.board import ClusterBoard
from cli.client import CONNECT_TIMEOUT_S, Client, server_events
from cli.errors import AuthError, CliError, MissingError, UsageError

PATH = "/admin/watch"
SILENT_S = 60.0  # a gateway sends at least a comment every 15 s
RETRY_S = 1.0


class ClusterFeed:
    """What a gateway shows of the cluster, from the start of the block on; `kinds` are those that matter.

    It connects again where the gateway ends or is lost, until the block ends.
    """

    def __init__(self, client: Client, *kinds: str) -> None:
        self._client = client
        self._kinds = {*kinds, "full"}
        self._board = ClusterBoard()
        self._error: CliError | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster feed", daemon=True)

    def __repr__(self) -> str:
        return f"<ClusterFeed {self._board!r} error={self._error!r}>"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()  # the thread, which may wait for the gateway, ends with its client or the process

    def wait(self) -> None:
        """Return when something that matters has changed since the last call, or now and then.

        Raises the CliError of a key that may not see the cluster, or a gateway that cannot show it.
        """
        self._news.wait()
        self._news.clear()
        with self._lock:
            error = self._error
        if isinstance(error, AuthError | UsageError | MissingError):
            raise error

    def board(self) -> tuple[ClusterBoard, CliError | None]:
        """Return what is known now, and why it may be out of date."""
        with self._lock:
            return self._board.copy(), self._error

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._follow()
                error = CliError("the gateway has ended the stream")
            except CliError as exc:
                error = exc
            except (RuntimeError, OSError):  # the client was closed, as the block has ended
                return
            with self._lock:
                self._error = error
            self._news.set()
            self._over.wait(RETRY_S)

    def _follow(self) -> None:
        timeout = httpx2.Timeout(SILENT_S, connect=CONNECT_TIMEOUT_S)
        with self._client.stream("GET", PATH, timeout=timeout) as response:
            for kind, text in server_events(response):
                if self._over.is_set():
                    return
                if kind == "comment":  # nothing has changed, but for ages
                    self._news.set()
                    continue
                frame = json.loads(text)
                if "error" in frame:  # the key was revoked, or has expired
                    raise AuthError(frame["error"]["message"])
                with self._lock:
                    changed, self._error = self._board.apply(frame), None
                if changed & self._kinds:
                    self._news.set()
