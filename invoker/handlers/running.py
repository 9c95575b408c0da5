"""One running handler process: its socket, calls, output and end."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from invoker.handlers import guard
from invoker.handlers.confine import Sandbox
from invoker.handlers.errors import (
    BadHandler,
    HandlerCrashed,
    HandlerError,
    HandlerRaised,
    HandlerStopped,
    OutputTooLarge,
)
from invoker.handlers.protocol import (
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
    encode,
    read_body,
    to_node,
)
from invoker.handlers.secret_values import SecretValues
from invoker.handlers.spawn import DRAIN_S, ProcessOutput, renew_cpu_limit, start_process, stop_process
from rdmacast.aio.shielded import run_shielded
from registry.config.handler_spec import HandlerSpec

GRACE_S = 0.5  # between cancelling an overdue call and killing the process
_RENEWAL_S = 0.1  # calls that begin within it share one renewal of limits.cpu
_LOAD_MESSAGE, _MESSAGE = 200, 2000  # characters
_SEE_LOG = "its log (`hypercast logs`) has more"


class HandlerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON value (UTF-8 bytes). `stream` is whether the handler yields, so that more may follow."""

    data: bytes
    stream: bool


class HandlerCall:
    """One call in progress; its values, then None or an error, arrive through `queue`."""

    def __init__(self, number: int, on_ended: Callable[[], None]) -> None:
        self.number = number
        self._on_ended = on_ended
        self.queue: asyncio.Queue[HandlerOutput | HandlerError | None] = asyncio.Queue()
        self.received_bytes = 0
        self.timer: asyncio.TimerHandle | None = None

    def finish(self, outcome: HandlerError | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.queue.put_nowait(outcome)
        self._on_ended()


class RunningHandler:
    """A process that has loaded the handler.

    `usable` is False once it is ending; then no call may begin. `ended` is set when the process has ended and
    all calls have failed.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: ProcessOutput,
        spec: HandlerSpec,
        on_log: Callable[[str], None],
        secrets: SecretValues,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output
        self._spec = spec
        self._secrets = secrets
        self._renewed_s = float("-inf")  # when limits.cpu was last renewed
        self._calls: dict[int, HandlerCall] = {}
        self._next_call = 1
        self._kill_reason: HandlerError | None = None
        self._retired = False
        self._overdue: set[int] = set()
        self._settled = asyncio.Event()
        self._settled.set()
        self.ended = asyncio.Event()
        output.start(lambda line: on_log(secrets.masked(line)), f"log of handler {process.pid}")
        self._exit_task = asyncio.create_task(self._exited())
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "usable" if self.usable else "dying"
        return f"<RunningHandler pid {self._process.pid} {state}, {len(self._calls)} calls>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        dying = self._kill_reason is not None or self.ended.is_set() or self._writer.is_closing()
        return not self._retired and not dying

    @classmethod
    async def spawn(
        cls,
        spec: HandlerSpec,
        sandbox: Sandbox,
        folder: Path,
        on_log: Callable[[str], None],
        *,
        secrets: SecretValues,
        timeout_s: float,
    ) -> "RunningHandler":
        """Start the process and load the handler. Raises BadHandler with the process's report."""
        ours, theirs = socket.socketpair()
        output = await ProcessOutput.open()
        try:
            with theirs:
                process = await start_process(folder, theirs, output.write_end)
        except BaseException as error:
            ours.close()
            output.close()
            if isinstance(error, OSError):
                raise BadHandler(f"the handler's process cannot be started: {error}") from error
            raise
        finally:
            os.close(output.write_end)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        running = cls(process, reader, writer, output, spec, on_log, secrets)
        try:
            await running._load(sandbox, timeout_s)
        except BaseException:
            await run_shielded(running._end())
            raise
        running._task = asyncio.create_task(running._serve())
        return running

    async def settled(self) -> None:
        """Return once no call is overdue: it has ended, or the process has."""
        await self._settled.wait()

    def begin(
        self, request_id: str, body: bytes, deadline: float, on_ended: Callable[[], None]
    ) -> HandlerCall:
        """Send one call; if it still runs at `deadline` (loop time) plus a grace, the process is killed.

        `on_ended` is called when the process has ended the call or itself, also without a waiting caller.
        """
        call = HandlerCall(self._next_call, on_ended)
        self._next_call += 1
        self._calls[call.number] = call
        self._renew_cpu_limit()
        reason = HandlerCrashed("its process was killed because another call exceeded its time limit")
        call.timer = asyncio.get_running_loop().call_at(deadline + GRACE_S, self.kill, reason)
        self._writer.write(encode(StartCall(call=call.number, request_id=request_id, body=body)))
        return call

    def abandon(self, call: HandlerCall, *, overdue: bool) -> None:
        """Cancel a call that has no waiting caller. Its timer stays armed until it ends."""
        if call.number in self._calls and not self.ended.is_set():
            if overdue:
                self._overdue.add(call.number)
                self._settled.clear()
            if not self._writer.is_closing():  # else its process is gone
                self._writer.write(encode(CancelCall(call=call.number)))

    def kill(self, reason: HandlerError) -> None:
        """Kill the process and its descendants; calls in progress end with `reason`."""
        if self._kill_reason is None:
            self._kill_reason = reason
        stop_process(self._process)

    async def aclose(self) -> None:
        """Kill the process and its descendants; calls in progress end with HandlerStopped."""
        self.kill(HandlerStopped("the handler was stopped"))
        await self.ended.wait()
        if self._task is not None:
            await self._task

    async def _load(self, sandbox: Sandbox, timeout_s: float) -> None:
        load = LoadHandler(
            file=self._spec.file,
            function=self._spec.function,
            env={**self._spec.env, **self._secrets.values},
            limits=self._spec.limits,
            sandbox=sandbox,
        )
        self._writer.write(encode(load))
        try:
            async with asyncio.timeout(timeout_s):
                body = await read_body(self._reader, 64 * 1024)
        except TimeoutError:
            raise BadHandler(f"the handler did not load within {timeout_s:g} s") from None
        except BadFrame as error:
            raise BadHandler(f"the handler broke the protocol: {error}") from error
        if body is None:
            raise BadHandler(f"the handler's process ended while loading: {_SEE_LOG}")
        try:
            answer = to_node.decode(body)
        except msgspec.DecodeError as error:
            raise BadHandler(f"the handler broke the protocol: {error}") from error
        if isinstance(answer, LoadFailed):
            raise BadHandler(f"the handler cannot be loaded: {answer.message[:_LOAD_MESSAGE]}; {_SEE_LOG}")
        if not isinstance(answer, HandlerReady):
            raise BadHandler("the handler broke the protocol while loading")

    async def _serve(self) -> None:
        """Receive frames until the process ends."""
        max_frame = self._spec.limits.output_bytes + OVERHEAD_BYTES + 16 * 1024
        try:
            while (body := await read_body(self._reader, max_frame)) is not None:
                self._on_frame(to_node.decode(body))
        except (BadFrame, msgspec.DecodeError) as error:
            self.kill(HandlerCrashed(f"the handler broke the protocol: {error}"))
        finally:
            await run_shielded(self._end())

    def _on_frame(self, frame: HandlerReady | LoadFailed | CallValue | CallEnded | CallFailed) -> None:
        match frame:
            case CallValue():
                call = self._calls.get(frame.call)
                if call is None:
                    raise BadFrame(f"output of an unknown call {frame.call}")
                call.received_bytes += len(frame.data)
                if call.received_bytes > self._spec.limits.output_bytes:
                    raise BadFrame("the output exceeds limits.output")
                call.queue.put_nowait(HandlerOutput(data=frame.data, stream=frame.stream))
            case CallEnded():
                self._finish(frame.call, None)
            case CallFailed():
                self._retired = self._retired or frame.kind == "out_of_memory"
                self._finish(frame.call, _failure(frame, self._secrets.masked(frame.message)))
            case _:
                raise BadFrame("a second answer to LoadHandler")

    def _finish(self, number: int, outcome: HandlerError | None) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            raise BadFrame(f"the end of an unknown call {number}")
        call.finish(outcome)
        self._overdue.discard(number)
        if not self._overdue:
            self._settled.set()

    async def _end(self) -> None:
        """Ensure that the process has ended, then fail its remaining calls."""
        stop_process(self._process)
        await self._exit_task
        await self._output.drain()
        self._writer.close()
        with suppress(OSError):  # the other end is closed
            await self._writer.wait_closed()
        reason = self._kill_reason or HandlerCrashed(f"{self._exit_reason()}; {_SEE_LOG}")
        self.ended.set()
        for call in self._calls.values():
            call.finish(reason)
        self._calls.clear()
        self._overdue.clear()
        self._settled.set()

    async def _exited(self) -> None:
        """Return once the process has ended, and all that it started."""
        await self._process.wait()
        asyncio.get_running_loop().call_later(DRAIN_S, self._writer.transport.abort)

    def _exit_reason(self) -> str:
        code, limits = self._process.returncode, self._spec.limits
        match code:
            case guard.CPU_STATUS:
                return f"the handler exceeded limits.cpu ({limits.cpu_s:g} s of processor time)"
            case guard.MEMORY_STATUS:
                return (
                    f"the handler exceeded limits.memory ({limits.memory_bytes} bytes in all its processes)"
                )
            case guard.TASKS_STATUS:
                return f"the handler exceeded limits.tasks ({limits.tasks} processes and threads)"
        if code is not None and code < 0:
            return f"the handler's process was killed by {signal.Signals(-code).name}"
        return f"the handler's process ended with status {code}"

    def _renew_cpu_limit(self) -> None:
        """Allow `cpu_s` more processor time from now."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._renewed_s > _RENEWAL_S:
            self._renewed_s = now_s
            renew_cpu_limit(self._process)


def _failure(frame: CallFailed, message: str) -> HandlerError:
    match frame.kind:
        case "too_large":
            return OutputTooLarge(message[:_MESSAGE])
        case "out_of_memory":
            return HandlerRaised(f"the handler exceeded limits.memory: {message[:_MESSAGE]}")
        case _:
            return HandlerRaised(message[:_MESSAGE])
