"""What comes to a stage beside a step: token ids, hidden states, or rows for its head."""

import torch

from invoker.engine.stage_contract import Stage, StageInput, StageStep, rows_of_bytes

_ID_BYTES = torch.int64.itemsize


class RowsOf:
    """Of one stage. With `finishes` it draws tokens of what the last stage ran: a tied head."""

    def __init__(self, stage: Stage, *, finishes: bool = False) -> None:
        self._facts = stage.facts
        self._of_ids = stage.layers[0] == 0 and not finishes
        self._finishes = finishes
        self._received = memoryview(b"")
        self._data: torch.Tensor | None = None  # of what was received last

    def nbytes(self, step: StageStep) -> int:
        """How many bytes of rows come with a step."""
        if self._of_ids:
            return step.tokens * _ID_BYTES
        return (len(step.wanting) if self._finishes else step.tokens) * self._facts.row_bytes

    def given(self, step: StageStep, received: memoryview) -> StageInput:
        """The step and its rows, which stay in the buffer that they came into."""
        data = self._data
        if data is None or received is not self._received:  # mostly steps are as large as the one before
            data = self._data = self._tensor(received)
            self._received = received
        return StageInput(step=step, data=data)

    def _tensor(self, received: memoryview) -> torch.Tensor:
        if self._of_ids:
            return rows_of_bytes(received, torch.int64, 1).view(-1)
        return rows_of_bytes(received, self._facts.row_dtype, self._facts.row_items)
