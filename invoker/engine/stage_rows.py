"""The rows that arrive at a stage with a step: token ids, hidden states, or rows for its head."""

import torch

from invoker.engine.stage_contract import Stage, StageInput, StageStep, rows_from_bytes

_ID_BYTES = torch.int64.itemsize


class StageRows:
    """The rows of one stage's input. With `finishes` they are for a tied head."""

    def __init__(self, stage: Stage, *, finishes: bool = False) -> None:
        self._facts = stage.facts
        self._is_token_ids = stage.layers[0] == 0 and not finishes
        self._finishes = finishes
        self._received = memoryview(b"")
        self._data: torch.Tensor | None = None  # the view of `_received`

    def nbytes(self, step: StageStep) -> int:
        """Return the number of bytes of the rows of a step."""
        if self._is_token_ids:
            return step.tokens * _ID_BYTES
        return (len(step.sampled_chunks) if self._finishes else step.tokens) * self._facts.row_bytes

    def stage_input(self, step: StageStep, received: memoryview) -> StageInput:
        """Return the step with its rows, which stay in the receive buffer."""
        data = self._data
        if data is None or received is not self._received:  # most steps are as large as the one before
            data = self._data = self._tensor(received)
            self._received = received
        return StageInput(step=step, data=data)

    def _tensor(self, received: memoryview) -> torch.Tensor:
        if self._is_token_ids:
            return rows_from_bytes(received, torch.int64, 1).view(-1)
        return rows_from_bytes(received, self._facts.row_dtype, self._facts.row_items)
