"""The best that source and target could do, as an integer program: what ZigZag's queue is held against.

After BlitzScale's program: T_i layers of request i run on the target, the others on the source, first come,
first served; minimise the average latency. Its constraints are said by time, so that they hold for any order
in which the target works, for requests of unequal tokens, and where the source waits: the source starts
request i once the target has done its part of it and of all before (C2), and once each layer among these has
landed and those behind it have been run (C3; the paper's counts the first layer's load, though its clock
begins when that layer is there).
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from zigzag_times import Relief

from registry.zigzag import Batch


def least_average_s(batches: Sequence[Batch], relief: Relief, *, overtaking: bool = False) -> float:
    """The average of the times at which the batches are done, in the best schedule; with `overtaking` one
    that the target runs to the end may end before earlier ones, which the paper's program leaves out."""
    program = _Program(len(batches), relief.layers)
    times = [batch.tokens * relief.token_layer_s for batch in batches]
    horizon = relief.source_free_s + relief.layers * (sum(times) + relief.load_s)
    for i in range(len(batches)):
        for layer in range(relief.layers):
            if layer:  # layers run on the target are a prefix
                program.at_least({program.runs(i, layer - 1): 1.0, program.runs(i, layer): -1.0}, 0.0)
            if i:  # `lands[i, l]`: one of the requests up to i runs layer l on the target
                program.at_least({program.lands(i, layer): 1.0, program.lands(i - 1, layer): -1.0}, 0.0)
            program.at_least({program.lands(i, layer): 1.0, program.runs(i, layer): -1.0}, 0.0)
            behind = {
                program.runs(j, later): -times[j]
                for j in range(i + 1)
                for later in range(layer, relief.layers)
            }
            started = {program.start(i): 1.0, program.lands(i, layer): -relief.load_s * layer}
            program.at_least(started | behind, 0.0)
        own = {program.runs(i, layer): times[i] for layer in range(relief.layers)}
        ended = {program.end(i): 1.0, program.start(i): -1.0}
        program.at_least(ended | own, times[i] * relief.layers)
        # What the target runs to the end takes no turn on the source, and if others may overtake, has none.
        whole = {program.runs(i, relief.layers - 1): horizon}
        program.at_least({program.freed(i): 1.0, program.end(i): -1.0} | whole, 0.0)
        program.at_least({program.start(i): 1.0} | whole, relief.source_free_s)
        if i:
            turn = {program.start(i): 1.0, program.freed(i - 1): -1.0}
            program.at_least(turn | (whole if overtaking else {}), 0.0)
            program.at_least({program.freed(i): 1.0, program.freed(i - 1): -1.0}, 0.0)
    return program.least_sum_of_ends(horizon) / len(batches)


class _Program:
    """Columns: which layers run on the target, which must have landed; when each request starts on
    the source, when it ends, and when the source has ended it and all before."""

    def __init__(self, requests: int, layers: int) -> None:
        self._requests, self._layers = requests, layers
        self._binaries = 2 * requests * layers
        self._columns = self._binaries + 3 * requests
        self._rows: list[np.ndarray] = []
        self._least: list[float] = []

    def runs(self, request: int, layer: int) -> int:
        return request * self._layers + layer

    def lands(self, request: int, layer: int) -> int:
        return (self._requests + request) * self._layers + layer

    def start(self, request: int) -> int:
        return self._binaries + request

    def end(self, request: int) -> int:
        return self._binaries + self._requests + request

    def freed(self, request: int) -> int:
        return self._binaries + 2 * self._requests + request

    def at_least(self, terms: dict[int, float], bound: float) -> None:
        row = np.zeros(self._columns)
        row[list(terms)] = list(terms.values())
        self._rows.append(row)
        self._least.append(bound)

    def least_sum_of_ends(self, horizon: float) -> float:
        costs = np.zeros(self._columns)
        costs[self._binaries + self._requests : self._binaries + 2 * self._requests] = 1.0
        whole = np.zeros(self._columns)
        whole[: self._binaries] = 1
        upper = np.full(self._columns, horizon * 2)
        upper[: self._binaries] = 1
        found = milp(
            costs,
            constraints=LinearConstraint(np.array(self._rows), lb=np.array(self._least)),
            integrality=whole,
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": 1e-4},
        )
        assert found.success, found.message
        return float(found.fun)
