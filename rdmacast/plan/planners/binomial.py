"""The binomial pipeline for any number of nodes: all links busy, all targets complete together (pure).

The nodes are the vertices of a hypercube of L = floor(log2 nodes) dimensions; at step j each vertex
talks to its neighbour along dimension j mod L. Where nodes are left over, they double vertices as
*twins*: of the two, one is the receiver of the vertex and the other its sender, and they swap roles so
that what the vertex sends next is always with the sender. It takes blocks + ceil(log2 nodes) - 1 steps.
"""

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.transfers import Ints, Transfers, gathered, ints

_NOTHING = -1


def steps(members: int, blocks: int) -> int:
    return 0 if members == 1 else blocks + (members - 1).bit_length() - 1


def binomial(members: int, blocks: int) -> Transfers:
    """Return the transfers by which node 0 sends all blocks to the others."""
    if members == 1:
        return gathered([])
    dimensions = members.bit_length() - 1
    vertices = 1 << dimensions
    vertex, lags = np.arange(vertices), _lags(dimensions)
    roles = _Roles(vertices, twins=members - vertices)
    held = np.zeros((vertices, blocks), dtype=np.bool_)
    held[0] = True
    parts = []
    for step in range(blocks + dimensions - 1):
        outgoing = np.minimum(step - lags[step % dimensions], blocks - 1)
        outgoing[0] = min(step, blocks - 1)
        partner = vertex ^ (1 << step % dimensions)
        sent = (outgoing >= 0) & (partner != 0)
        sent[sent] &= ~held[partner[sent], outgoing[sent]]
        block, receivers = outgoing[sent], partner[sent]
        parts.append(_at(step, roles.sender[sent], roles.receiver[receivers], block))
        parts.append(_at(step, *roles.hand_over()))
        held[receivers, block] = True
        roles.received(receivers, block)
        roles.swap(step % dimensions)
    for _ in range(2):  # both ways in one step
        parts.append(_at(blocks + dimensions - 1, *roles.hand_over()))
        roles.swap_all()
    return gathered(parts)


def _at(step: int, source: Ints, target: Ints, block: NDArray[np.int64]) -> Transfers:
    return Transfers(ints(np.full(len(source), step)), source, target, ints(block))


def _lags(dimensions: int) -> NDArray[np.int64]:
    """Return `lags[phase, v]`: how far behind the source's block the one is that v sends in that phase.

    The next bit of v that is set, counted from the phase upwards and around, is the step in which v last
    received.
    """
    vertex = np.arange(1 << dimensions)
    lags = np.full((dimensions, len(vertex)), dimensions, dtype=np.int64)
    for phase in range(dimensions):
        for ahead in reversed(range(dimensions)):
            is_set = (vertex >> (phase + ahead) % dimensions) & 1 == 1
            lags[phase, is_set] = dimensions - ahead
    return lags


class _Roles:
    """Which of a vertex's nodes receives and which sends, and the one block that only either of them has.

    Of twins the receiver lacks at most one block that the sender has, and the other way round: each step
    the receiver takes one block in and hands over the one that it had alone.
    """

    def __init__(self, vertices: int, twins: int) -> None:
        vertex = ints(np.arange(vertices))
        self.receiver = vertex.copy()
        self.sender = vertex.copy()
        self._doubled = vertex[1 : twins + 1]
        self.sender[self._doubled] = vertices - 1 + self._doubled
        self._only_receiver = np.full(vertices, _NOTHING, dtype=np.int64)
        self._only_sender = np.full(vertices, _NOTHING, dtype=np.int64)

    def hand_over(self) -> tuple[Ints, Ints, NDArray[np.int64]]:
        """Return (source, target, block) where a receiver passes its sender the block that this lacks."""
        giving = self._doubled[self._only_receiver[self._doubled] != _NOTHING]
        given = self._only_receiver[giving]
        self._only_receiver[giving] = _NOTHING
        return self.receiver[giving], self.sender[giving], given

    def received(self, receivers: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Record, after `hand_over`, that the receivers of these vertices got blocks new to the vertices."""
        self._only_receiver[receivers] = blocks

    def swap(self, dimension: int) -> None:
        """Swap the roles at the vertices whose coordinate in the dimension is 1."""
        self._swap(self._doubled[(self._doubled >> dimension) & 1 == 1])

    def swap_all(self) -> None:
        self._swap(self._doubled)

    def _swap(self, at: Ints) -> None:
        self.receiver[at], self.sender[at] = self.sender[at], self.receiver[at]
        self._only_receiver[at], self._only_sender[at] = self._only_sender[at], self._only_receiver[at]
