"""The node's side of a user's handler: start, invoke, stop; an ended process is restarted with backoff."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from invoker.handlers.confine import DEFAULT_SANDBOX, Sandbox
from invoker.handlers.errors import (
    BadHandler,
    HandlerError,
    HandlerRaised,
    HandlerStopped,
    HandlerTimeout,
)
from invoker.handlers.files import make_folder, remove_folder
from invoker.handlers.protocol import MAX_BODY_BYTES
from invoker.handlers.running import HandlerOutput, RunningHandler
from invoker.handlers.secret_values import SecretValues
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.shielded import run_shielded
from registry.config.function_yaml import FILE_NAME, parse_function_yaml
from registry.config.handler_spec import HandlerSpec
from registry.errors import InvalidRecord

LOAD_TIMEOUT_S = 60.0
_NO_SECRETS: Mapping[str, str] = {}
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 10.0


def handler_spec(files: Mapping[str, bytes]) -> HandlerSpec:
    """Return the handler that the function.yaml among `files` declares. Raises BadHandler."""
    if FILE_NAME not in files:
        raise BadHandler(f"the function has no {FILE_NAME}")
    try:
        spec = parse_function_yaml(files[FILE_NAME]).handler
    except InvalidRecord as error:
        raise BadHandler(f"{FILE_NAME}: {error}") from error
    if spec is None:
        raise BadHandler(f"{FILE_NAME}: handler: missing; name FILE.py:FUNCTION")
    return spec


def backoff_s(failures: int) -> float:
    """Return the delay before a start after `failures` consecutive failures."""
    return min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (failures - 1)) if failures else 0.0


def _nothing() -> None:
    return None


class HandlerProcess:
    """One handler in a process of its own.

    Any number of calls may run at once: async handlers share the child's loop, plain ones its threads. A
    failed call leaves the others alone, unless the process itself ends or must be killed. An ended process is
    restarted by the next call, after a delay that doubles with each consecutive failure.
    """

    def __init__(
        self,
        on_log: Callable[[str], None],
        *,
        sandbox: Sandbox = DEFAULT_SANDBOX,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._on_log = on_log
        self._sandbox = sandbox
        self._load_timeout_s = load_timeout_s
        self._files: Mapping[str, bytes] = {}
        self._secrets = SecretValues({})
        self._spec: HandlerSpec | None = None
        self._scratch_dir = Path()
        self._folder: Path | None = None
        self._running: RunningHandler | None = None
        self._starting: asyncio.Task[None] | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._running) if self._running else "idle"
        return f"<HandlerProcess {state}, {self._failures} consecutive failures>"

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        return self._running.pid if self._running is not None and self._running.usable else None

    async def start(
        self,
        files: Mapping[str, bytes],
        spec: HandlerSpec,
        scratch_dir: Path,
        secrets: Mapping[str, str] = _NO_SECRETS,
    ) -> None:
        """Write `files` into a private folder under `scratch_dir` and load the handler.

        Of `secrets` the process gets those that the handler names. Raises BadHandler, also for limits above
        the node's ceilings or a missing secret. After a failure nothing is left behind.
        """
        if excess := spec.limits.excess(self._sandbox.ceilings):
            raise BadHandler(f"{excess} of this node (--handler-limits)")
        if missing := [key for key in spec.secrets if key not in secrets]:
            raise BadHandler(f"the gateway sent no secret {missing[0]}: it is of an earlier release")
        self._secrets = SecretValues({key: secrets[key] for key in spec.secrets})
        self._files = dict(files)
        self._spec = spec
        self._scratch_dir = scratch_dir
        await self._started(spec)

    async def invoke(
        self, request_id: str, body: bytes, timeout_s: float, on_ended: Callable[[], None] = _nothing
    ) -> AsyncIterator[HandlerOutput]:
        """Call the handler with a JSON body; yield its values as they arrive.

        Leaving the iterator early (use contextlib.aclosing) cancels the call. A plain function cannot be
        stopped: `on_ended` is called when it has really ended. Raises HandlerError.
        """
        try:
            spec = self._checked(body)
            timeout_s = min(timeout_s, spec.limits.timeout_s)
            deadline = asyncio.get_running_loop().time() + timeout_s
            overdue = HandlerTimeout(f"the handler did not return within {timeout_s:g} s")
            try:
                async with asyncio.timeout_at(deadline):
                    running = await self._usable(spec)
            except TimeoutError:
                raise overdue from None
            call = running.begin(request_id, body, deadline, on_ended)
        except BaseException:
            on_ended()
            raise
        timed_out = False
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        item = await call.queue.get()
                except TimeoutError:
                    timed_out = True
                    raise overdue from None
                if isinstance(item, HandlerError):
                    raise item
                if item is None:
                    self._failures = 0
                    return
                yield item
        finally:
            running.abandon(call, overdue=timed_out)

    async def aclose(self) -> None:
        """Stop the process and remove its folder; calls in progress end with HandlerStopped. Idempotent."""
        self._closed = True
        if self._starting is not None:
            await cancel_and_wait(self._starting)
        if self._running is not None:
            await self._running.aclose()
            self._running = None
        await self._drop_folder()

    def _checked(self, body: bytes) -> HandlerSpec:
        """Return the spec to call, or raise if it cannot be called with this body."""
        if self._spec is None:
            raise HandlerStopped("the handler has not been started")
        if len(body) > MAX_BODY_BYTES:
            raise HandlerRaised(f"the request's body exceeds {MAX_BODY_BYTES} bytes")
        return self._spec

    async def _usable(self, spec: HandlerSpec) -> RunningHandler:
        """Return the running process, or a new one after the backoff."""
        while True:
            running = self._running
            if running is not None:
                await running.settled()
                if running.usable:
                    return running
            await self._started(spec)

    async def _started(self, spec: HandlerSpec) -> None:
        """Join the start in progress, or begin one; a cancelled caller does not stop it for the others."""
        if self._closed:
            raise HandlerStopped("the handler was stopped")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(spec))
            self._starting.add_done_callback(self._start_over)
        starting = self._starting
        await asyncio.wait([starting])
        if starting.cancelled():
            raise HandlerStopped("the handler was stopped")
        error = starting.exception()
        if isinstance(error, BadHandler):
            raise BadHandler(str(error)) from error
        if error is not None:
            raise error

    def _start_over(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the waiters may have been cancelled

    async def _start(self, spec: HandlerSpec) -> None:
        loop = asyncio.get_running_loop()
        if self._running is not None:
            await self._running.ended.wait()
            await self._running.aclose()
            self._running = None
            self._count_failure(loop.time())
        await asyncio.sleep(self._retry_at - loop.time())
        try:
            self._running = await self._spawn(spec)
        except BadHandler:
            self._count_failure(loop.time())
            raise

    def _count_failure(self, now: float) -> None:
        self._failures += 1
        self._retry_at = now + backoff_s(self._failures)

    async def _spawn(self, spec: HandlerSpec) -> RunningHandler:
        """Start a process in a new folder; the old one may be full of the last process's files."""
        await self._drop_folder()
        self._folder = await asyncio.to_thread(make_folder, self._scratch_dir, self._files)
        try:
            return await RunningHandler.spawn(
                spec,
                self._sandbox,
                self._folder,
                self._on_log,
                secrets=self._secrets,
                timeout_s=self._load_timeout_s,
            )
        except BaseException:
            await run_shielded(self._drop_folder())
            raise

    async def _drop_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove_folder, folder)
