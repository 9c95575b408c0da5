"""Block transfers as parallel arrays: a plan of thousands of nodes has millions of them (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def ints(values: Sequence[int] | NDArray[np.integer]) -> Ints:
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """At step `step[i]` node `source[i]` sends block `block[i]` to node `target[i]`."""

    step: Ints
    source: Ints
    target: Ints
    block: Ints

    def __post_init__(self) -> None:
        if not len(self.step) == len(self.source) == len(self.target) == len(self.block):
            raise ValueError("the arrays of transfers must be of one length")
        for column in (self.step, self.source, self.target, self.block):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        return f"Transfers({len(self)} in {self.steps} steps)"

    @property
    def steps(self) -> int:
        return int(self.step.max()) + 1 if len(self) else 0

    def in_order(self) -> "Transfers":
        """Return the same transfers sorted by step."""
        return self.chosen(np.argsort(self.step, kind="stable"))

    def chosen(self, index: NDArray[np.integer] | NDArray[np.bool_]) -> "Transfers":
        """Return the transfers of a mask or of an index array."""
        return Transfers(self.step[index], self.source[index], self.target[index], self.block[index])


def gathered(parts: Sequence[Transfers]) -> Transfers:
    """Concatenate transfers, sorted by step."""
    if not parts:
        return Transfers(ints([]), ints([]), ints([]), ints([]))
    return Transfers(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.block for part in parts]),
    ).in_order()
