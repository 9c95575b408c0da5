"""Runs a stage: receives steps from the previous stage and sends them to the next one."""

import socket

from invoker.engine.contract import EngineError
from invoker.links.frames import FailedStep, StageMessage
from invoker.links.framing import LinkFrame, LinkLost
from invoker.pipeline.metered import MeteredStage
from invoker.pipeline.stage_thread import StageThread


class StageWorker(StageThread):
    """A stage worker, running from its construction."""

    def __init__(
        self, stage: MeteredStage, before: socket.socket, behind: socket.socket, *, name: str
    ) -> None:
        super().__init__(stage, before, behind, name=name)
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "running"
        return f"<StageWorker {state} {self._stage.stage!r}>"

    def _on_frame(self, frame: LinkFrame[StageMessage]) -> None:
        message = frame.message
        if isinstance(message, FailedStep):
            self._send_failed(message.number, message.reason)
            return
        try:
            output = self._stage.run(self._rows.stage_input(message, frame.payload))
        except EngineError as error:
            self._send_failed(message.number, str(error))
            return
        if output.hidden is None:
            raise LinkLost("the last stage of a pipeline cannot be a worker")
        self._send(output)
        self._wire.drain()  # else the end of the rows would wait for the next step
