"""The program of a handler's process: `python -I -m invoker.handlers.child FD PARENT_PID`.

It reads LoadHandler and forks: the parent becomes the guard. The child confines itself, takes the function's
environment, loads the handler and then serves calls until the node closes the socket. A plain function runs
in a thread, an async one on the loop; the result may be a value, a generator or an async generator, the
values of which are sent one by one.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from invoker.handlers import confine
from invoker.handlers.guard import GroupLimits, fork_guarded
from invoker.handlers.protocol import (
    LENGTH_BYTES,
    MAX_BODY_BYTES,
    OVERHEAD_BYTES,
    BadFrame,
    CallEnded,
    CallFailed,
    CallValue,
    CancelCall,
    HandlerReady,
    LoadFailed,
    LoadHandler,
    StartCall,
    ToNode,
    encode,
    read_body,
    to_child,
)
from rdmacast.aio import threads

_LAST_FRAMES = 20  # of a traceback
_MESSAGE_CHARACTERS = 2000
_STACK_BYTES = 2 << 20


class _TooLarge(Exception):
    """The call's output exceeds its limit."""


def main() -> None:
    """Serve one node until it closes the socket."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    confine.die_with(parent_pid)
    confine.close_descriptors(keep=descriptor)
    os.umask(0o077)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    load = _receive_load(sock)
    limits = GroupLimits(
        memory_bytes=load.limits.memory_bytes, tasks=load.limits.tasks, cpu_s=load.limits.cpu_s
    )
    fork_guarded(limits, node=parent_pid, socket=descriptor)
    scratch = Path.cwd()
    # The limit counts the stacks of threads; the default of 8 MiB is far too much.
    threading.stack_size(_STACK_BYTES)
    try:
        confine.confine(scratch, load.limits, load.sandbox)
    except OSError as error:
        sock.sendall(encode(LoadFailed(message=f"its process cannot be confined: {error}")))
        raise SystemExit(1) from None
    # Not before: the names steer what loads libraries and starts interpreters.
    os.environ.update(load.env)
    try:
        handler = _load(scratch, load)
    except BaseException as error:  # the user's code may raise anything
        _log(f"the handler cannot be loaded:\n{_traceback(error)}")
        sock.sendall(encode(LoadFailed(message=type(error).__name__)))
        raise SystemExit(1) from None
    sock.sendall(encode(HandlerReady()))
    asyncio.run(_serve(sock, handler, load))


def _exit(status: int) -> NoReturn:
    """Exit at once: threads still in the handler's code would keep the interpreter from ending."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _receive_load(sock: socket.socket) -> LoadHandler:
    """Read the first frame before any thread exists: Landlock and capabilities are per thread."""
    length = int.from_bytes(sock.recv(LENGTH_BYTES, socket.MSG_WAITALL), "big")
    frame = to_child.decode(sock.recv(length, socket.MSG_WAITALL))
    if not isinstance(frame, LoadHandler):
        raise SystemExit("the first frame must be Load")
    return frame


def _load(scratch: Path, load: LoadHandler) -> Callable[[Any], Any]:
    """Import the handler's file; its neighbours are importable too."""
    sys.path.insert(0, str(scratch))
    path = scratch / load.file
    if not path.is_file():
        raise FileNotFoundError(f"the function has no file {load.file}")
    spec = importlib.util.spec_from_file_location("handler" if path.stem == "handler" else path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{load.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    handler = getattr(module, load.function, None)
    if not callable(handler):
        raise AttributeError(f"{load.file} has no function {load.function}")
    return handler


async def _serve(sock: socket.socket, handler: Callable[[Any], Any], load: LoadHandler) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    pool = ThreadPoolExecutor(load.limits.threads, thread_name_prefix="handler")
    service = _Service(handler, writer, pool, load.limits.output_bytes)
    while (body := await read_body(reader, MAX_BODY_BYTES + OVERHEAD_BYTES)) is not None:
        match to_child.decode(body):
            case StartCall() as invoke:
                service.begin(invoke)
            case CancelCall(call=call):
                service.cancel(call)
            case LoadHandler():
                raise BadFrame("a second Load")
    # The node closed the socket: running calls have no reader.
    _exit(0)


class _Service:
    """The calls in progress."""

    def __init__(
        self,
        handler: Callable[[Any], Any],
        writer: asyncio.StreamWriter,
        pool: ThreadPoolExecutor,
        output_bytes: int,
    ) -> None:
        self._handler = handler
        self._writer = writer
        self._pool = pool
        self._output_bytes = output_bytes
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: dict[int, threading.Event] = {}

    def begin(self, invoke: StartCall) -> None:
        self._cancelled[invoke.call] = threading.Event()
        self._tasks[invoke.call] = asyncio.create_task(self._answer(invoke))

    def cancel(self, call: int) -> None:
        if call in self._tasks:
            self._cancelled[call].set()
            self._tasks[call].cancel()

    async def _answer(self, invoke: StartCall) -> None:
        """Run one call and send its result; every call ends with CallEnded or CallFailed."""
        call = invoke.call
        last: ToNode
        try:
            await self._run(invoke)
            last = CallEnded(call=call)
        except _TooLarge:
            message = f"the output exceeds limits.output, {self._output_bytes} bytes"
            last = CallFailed(call=call, kind="too_large", message=message)
        except asyncio.CancelledError:
            last = CallFailed(call=call, kind="cancelled", message="cancelled")
        except MemoryError as error:
            last = _failed(invoke, "out_of_memory", error)
        except BaseException as error:  # the user's code may raise anything
            last = _failed(invoke, "raised", error)
        del self._tasks[call], self._cancelled[call]
        await self._send(last)
        if isinstance(last, CallFailed) and last.kind == "out_of_memory":
            # The heap may be full of the handler's objects; a new process starts clean.
            _exit(1)

    async def _run(self, invoke: StartCall) -> None:
        try:
            request = json.loads(invoke.body) if invoke.body.strip() else None
        except ValueError as error:
            raise ValueError(f"the request's body is not JSON: {error}") from None
        output = _CallOutput(self._send, invoke.call, self._output_bytes)
        if inspect.iscoroutinefunction(self._handler) or inspect.isasyncgenfunction(self._handler):
            result = self._handler(request)
        else:
            result = await self._in_thread(lambda: self._handler(request))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            try:
                async for value in result:
                    await output.send(value, stream=True)
            finally:
                await _close_async(result)
        elif inspect.isgenerator(result):
            await self._in_thread(lambda: self._drain(invoke.call, result, output))
        else:
            await output.send(result, stream=False)

    def _drain(self, call: int, values: Iterator[Any], output: "_CallOutput") -> None:
        """Send a plain generator's values from its thread, no faster than the node reads them."""
        cancelled = self._cancelled[call]
        loop = output.loop
        try:
            for value in values:
                if cancelled.is_set():
                    return
                asyncio.run_coroutine_threadsafe(output.send(value, stream=True), loop).result()
        finally:
            values.close()  # type: ignore[attr-defined]

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the pool; if the call is cancelled, wait for the thread first.

        The thread cannot be stopped, and the node must not consider the call ended while it runs.
        """
        return await threads.run_in_thread(work, executor=self._pool, undo=_close_generator)

    async def _send(self, frame: ToNode) -> None:
        self._writer.write(encode(frame))
        await self._writer.drain()


class _CallOutput:
    """The output of one call: encodes values as JSON and enforces the limit."""

    def __init__(self, send: Callable[[ToNode], Any], call: int, limit_bytes: int) -> None:
        self.loop = asyncio.get_running_loop()
        self._send = send
        self._call = call
        self._left = limit_bytes

    async def send(self, value: Any, *, stream: bool) -> None:
        try:
            data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the handler's result is not JSON: {error}") from None
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge
        await self._send(CallValue(call=self._call, data=data, stream=stream))


def _close_generator(result: object) -> None:
    if inspect.isgenerator(result):
        result.close()


async def _close_async(values: AsyncIterator[Any]) -> None:
    if inspect.isasyncgen(values):
        await values.aclose()


def _failed(invoke: StartCall, kind: Literal["raised", "out_of_memory"], error: BaseException) -> CallFailed:
    """Return the failure for the caller, which gets the exception alone; its traceback is for the log."""
    _log(f"request {invoke.request_id} failed:\n{_traceback(error)}")
    message = "".join(traceback.format_exception_only(error)).strip()
    return CallFailed(call=invoke.call, kind=kind, message=message[:_MESSAGE_CHARACTERS])


def _log(text: str) -> None:
    """Write to the function's log, whatever the handler made of sys.stderr."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _traceback(error: BaseException) -> str:
    """Return an exception for the function's author: only frames of their code, the last ones."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)
    ]
    lines = traceback.format_list([frame for frame in frames if "importlib" not in frame.filename])
    text = "".join(lines[-_LAST_FRAMES:]) + "".join(traceback.format_exception_only(error))
    return text.strip()[-8000:]


_OWN = tuple(str(Path(file).parent) for file in (__file__, threads.__file__, asyncio.__file__, os.__file__))

if __name__ == "__main__":
    try:
        main()
    except (msgspec.DecodeError, BadFrame) as error:
        print(f"bad frame from the node: {error}", file=sys.stderr)
        _exit(1)
