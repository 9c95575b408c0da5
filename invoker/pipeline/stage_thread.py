"""The thread that owns a stage and its links."""

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
from invoker.engine.stage_rows import StageRows
from invoker.links.frames import StageMessage, encode_failed, encode_step, stage_reader
from invoker.links.framing import FrameReader, LinkFrame, LinkLost, MessageT
from invoker.links.wire import StageWire
from invoker.pipeline.metered import MeteredStage

log = logging.getLogger("invoker.stages")


class WireThread(Generic[MessageT]):
    """A thread that handles frames until it is closed or a link is lost.

    It owns both sockets. Methods named `_on…` run on the thread.
    """

    def __init__(
        self, before: socket.socket, behind: socket.socket, reader: FrameReader[MessageT], *, name: str
    ) -> None:
        self._wire = StageWire(before, behind, reader)
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._closed = asyncio.Event()
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()  # guarded by the lock
        self.failure: Exception | None = None  # why it ended, if not by `aclose`
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def wait_closed(self) -> None:
        """Return once the thread has ended."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End the thread after the current step, and free its resources. Idempotent."""
        self._closing.set()
        self._wire.wake()
        await self._closed.wait()
        self._thread.join()

    def _submit(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread, between two frames."""
        with self._lock:
            self._commands.append(command)
        self._wire.wake()

    def _call_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _on_wake(self) -> None:
        """Run the submitted commands."""
        if not self._commands:  # without the lock: `_submit` wakes the thread after it has appended
            return
        with self._lock:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _on_frame(self, frame: LinkFrame[MessageT]) -> None:
        raise NotImplementedError

    def _on_idle(self) -> bool:
        """Do other work while there is no frame; return whether there was any."""
        return False

    def _on_end(self) -> None:
        """Free what the thread owns."""

    def _main(self) -> None:
        try:
            while True:
                closing = self._closing.is_set()  # read first: commands submitted before `aclose` still run
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
        except Exception as error:  # reported through `failure`
            log.exception("stage thread failed")
            self.failure = error.with_traceback(None)
        finally:
            self._wire.close()
            try:
                self._on_end()
            except Exception:  # `_closed` must be set in any case
                log.exception("stage thread failed to free its resources")
            self._call_loop(self._closed.set)


class StageThread(WireThread[StageMessage]):
    """A thread that also owns a stage and runs its steps."""

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
        self._rows = StageRows(stage.stage, finishes=finishes)
        super().__init__(before, behind, stage_reader(self._rows.nbytes), name=name)

    def export_kv(self, sequence: str) -> None:
        """Have the stage export a sequence's K and V after the current step. Called on the loop."""
        self._submit(partial(self._stage.export, sequence))

    def _send(self, output: StageOutput) -> None:
        """Send a step and its rows to the next stage."""
        assert output.hidden is not None
        rows = rows_as_bytes(output.hidden)
        self._wire.send(encode_step(output.step, len(rows)), rows)

    def _send_failed(self, number: int, reason: str) -> None:
        self._wire.send(encode_failed(number, reason))

    def _on_end(self) -> None:
        self._stage.close()
