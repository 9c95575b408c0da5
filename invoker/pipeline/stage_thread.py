"""A stage and its links, and the thread that alone touches them."""

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic

from invoker.engine.stage_contract import StageOutput, rows_as_bytes
from invoker.engine.stage_rows import RowsOf
from invoker.stages.frames import Frame, FrameReader, LinkLost, pack_failed, pack_step
from invoker.stages.metered import MeteredStage
from invoker.stages.wire import Reader, Wire, Word

log = logging.getLogger("invoker.stages")


class WireThread(Generic[Word]):
    """Takes frames as they come, until it is closed or a link is lost. It owns the sockets; what begins with
    `_on` is the thread's."""

    def __init__(
        self, before: socket.socket, behind: socket.socket, reader: Reader[Word], *, name: str
    ) -> None:
        self._wire = Wire(before, behind, reader)
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._closed = asyncio.Event()
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()  # guarded by the lock
        self.failure: Exception | None = None  # why it ended, if nobody closed it
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def wait_closed(self) -> None:
        """Return once it has ended."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End it after the step under way, and free what it has. Idempotent."""
        self._closing.set()
        self._wire.wake()
        await self._closed.wait()
        self._thread.join()  # it has nothing left to do

    def _submit(self, command: Callable[[], None]) -> None:
        """Have the thread carry it out, between two frames."""
        with self._lock:
            self._commands.append(command)
        self._wire.wake()

    def _call_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left who could read this
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _on_wake(self) -> None:
        """Carry out what was asked of the thread."""
        if not self._commands:  # mostly: whoever adds one wakes the thread after that
            return
        with self._lock:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _on_frame(self, frame: Word) -> None:
        raise NotImplementedError

    def _on_idle(self) -> bool:
        """No frame is here; whether there was something else to do."""
        return False

    def _on_end(self) -> None:
        """Let go of what the thread has."""

    def _main(self) -> None:
        try:
            while True:
                closing = self._closing.is_set()  # before: what was asked until then is carried out
                self._on_wake()
                if closing:
                    break
                frame = self._wire.receive()
                if frame is not None:
                    self._on_frame(frame)
                elif not self._on_idle():
                    self._wire.wait()
        except LinkLost as error:
            self.failure = error
        except Exception as error:  # whatever it is: who waits for the end is told of it
            log.exception("the thread of a stage failed")
            self.failure = error.with_traceback(None)
        finally:
            self._wire.close()
            try:
                self._on_end()
            except Exception:  # who waits for the end is told of that in any case
                log.exception("the thread of a stage could not let go of all that it has")
            self._call_loop(self._closed.set)


class StageThread(WireThread[Frame]):
    """Owns a stage, too, and takes its steps."""

    def __init__(
        self,
        stage: MeteredStage,
        before: socket.socket,
        behind: socket.socket,
        *,
        name: str,
        finishes: bool = False,
    ) -> None:
        self._stage = stage
        self._rows = RowsOf(stage.stage, finishes=finishes)
        super().__init__(before, behind, FrameReader(self._rows.nbytes), name=name)

    def give(self, sequence: str) -> None:
        """Have the stage put aside what it has of it, after the step under way. The loop's."""
        self._submit(partial(self._stage.give, sequence))

    def _send(self, output: StageOutput) -> None:
        """Hand a step and its rows on."""
        assert output.hidden is not None
        rows = rows_as_bytes(output.hidden)
        self._wire.push(memoryview(pack_step(output.step, len(rows))), rows)

    def _send_failed(self, number: int, reason: str) -> None:
        self._wire.push(memoryview(pack_failed(number, reason)))

    def _on_end(self) -> None:
        self._stage.close()
