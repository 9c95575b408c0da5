"""A stage at work: steps come from the stage before, and go on to the one behind."""

import asyncio
import logging
import socket
import threading
from contextlib import suppress

from invoker.engine.contract import EngineError
from invoker.engine.stage_rows import RowsOf
from invoker.stages.frames import FailedStep, Frame, LinkLost
from invoker.stages.metered import MeteredStage
from invoker.stages.wire import Wire

log = logging.getLogger("invoker.stages")


class StageWorker:
    """Owns the stage, its links and the thread that alone touches them, from when it is made."""

    def __init__(
        self, stage: MeteredStage, before: socket.socket, behind: socket.socket, *, name: str
    ) -> None:
        self._stage = stage
        self._rows = RowsOf(stage.stage)
        self._wire = Wire(before, behind, self._rows.nbytes)
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._closed = asyncio.Event()
        self.failure: Exception | None = None  # why it ended, if nobody closed it
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "at work"
        return f"<StageWorker {state} {self._stage.stage!r}>"

    async def wait_closed(self) -> None:
        """Return once it has ended."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End it after the step under way, and free what it has. Idempotent."""
        self._closing.set()
        self._wire.wake()
        await self._closed.wait()
        self._thread.join()  # it has nothing left to do

    def _main(self) -> None:
        try:
            while not self._closing.is_set():
                frame = self._wire.receive()
                if frame is None:
                    self._wire.wait()
                else:
                    self._pass_on(frame)
        except LinkLost as error:
            self.failure = error
        except Exception as error:
            log.exception("a stage failed")
            self.failure = error.with_traceback(None)
        finally:
            self._wire.close()
            self._stage.close()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closed.set)

    def _pass_on(self, frame: Frame) -> None:
        said = frame.said
        if isinstance(said, FailedStep):
            self._wire.send_failed(said.number, said.reason)
            return
        try:
            output = self._stage.run(self._rows.given(said, frame.rows))
        except EngineError as error:
            self._wire.send_failed(said.number, str(error))
            return
        if output.hidden is None:
            raise LinkLost("a stage that draws tokens was given no pipeline to draw for")
        self._wire.send(output)
