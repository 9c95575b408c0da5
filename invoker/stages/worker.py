"""A stage at work: steps come from the stage before, and go on to the one behind."""

import socket

from invoker.engine.contract import EngineError
from invoker.stages.frames import FailedStep, Frame, LinkLost
from invoker.stages.metered import MeteredStage
from invoker.stages.stage_thread import StageThread


class StageWorker(StageThread):
    """At work from when it is made."""

    def __init__(
        self, stage: MeteredStage, before: socket.socket, behind: socket.socket, *, name: str
    ) -> None:
        super().__init__(stage, before, behind, name=name)
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "at work"
        return f"<StageWorker {state} {self._stage.stage!r}>"

    def _on_frame(self, frame: Frame) -> None:
        said = frame.said
        if isinstance(said, FailedStep):
            self._send_failed(said.number, said.reason)
            return
        try:
            output = self._stage.run(self._rows.given(said, frame.rows))
        except EngineError as error:
            self._send_failed(said.number, str(error))
            return
        if output.hidden is None:
            raise LinkLost("a stage that draws tokens was given no pipeline to draw for")
        self._send(output)
        self._wire.send_out()  # or the end of its rows would wait for the next step
