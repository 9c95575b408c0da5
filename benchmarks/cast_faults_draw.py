"""Which casts there are to be, and what happens in each: drawn from a seed (pure)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rdmacast.plan import CastShape
from rdmacast.planners.catalog import PLANNERS

# Before the first blocks and after the last there is little to lose.
_EARLIEST, _LATEST = 0.05, 0.95
UNDISTURBED = 3  # of each shape
DAMAGED = 2  # of each shape, without a kill


class Role(StrEnum):
    SOURCE = "source"
    RELAY = "relay"  # a target that passes blocks on
    TARGET = "target"  # one that passes none on


class Fault(StrEnum):
    KILL = "kill"  # kill -9
    HANG = "hang"  # it stops, its connections stay open: as a host whose cable was pulled


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Casts that take the same time while nothing happens."""

    transport: str
    planner: str

    def __str__(self) -> str:
        return f"{self.transport} {self.planner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What happens to a node after the share `at` of an undisturbed cast.

    With `returns` it comes back at once, with what it had kept.
    """

    fault: Fault
    role: Role
    rank: int
    at: float
    returns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One cast; `damage` is the share of blocks in which a byte is flipped."""

    name: str
    shape: Shape
    strike: Strike | None = None
    damage: float = 0.0

    @property
    def is_undisturbed(self) -> bool:
        return self.strike is None and not self.damage

    def __str__(self) -> str:
        strike, told = self.strike, str(self.shape)
        if strike is not None:
            told += f", {strike.fault} of {strike.role} {strike.rank} at {strike.at:.0%}"
            told += ", which returns" if strike.returns else ""
        return told + (f", {self.damage:.0%} of blocks damaged" if self.damage else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deck:
    """What trials are drawn from: of `casts` with a node struck, `damaged` and `returns` are shares."""

    casts: int
    nodes: int
    sources: int
    blocks: int
    shapes: Sequence[Shape]
    fault: Fault = Fault.KILL
    damage: float = 0.01
    damaged: float = 0.5
    returns: float = 0.25
    undisturbed: int = UNDISTURBED
    only_damaged: int = DAMAGED

    def __post_init__(self) -> None:
        if not 2 <= self.sources < self.nodes:
            raise ValueError("a source may be killed, so 2 or more are needed, and fewer than nodes")


def draw(deck: Deck, seed: int) -> list[Trial]:
    """First an undisturbed cast of each shape, then all others, mixed."""
    seeded = random.Random(seed)
    first = [Trial(name=f"{shape} first", shape=shape) for shape in deck.shapes]
    others = [
        Trial(name=f"{shape} {kind} {number}", shape=shape, damage=damage)
        for shape in deck.shapes
        for kind, count, damage in (
            ("undisturbed", deck.undisturbed - 1, 0.0),
            ("damaged", deck.only_damaged, deck.damage),
        )
        for number in range(count)
    ]
    roles = {shape: roles_of(shape.planner, deck) for shape in deck.shapes}
    others += [_struck(deck, number, roles, seeded) for number in range(deck.casts)]
    seeded.shuffle(others)
    return first + others


def _struck(
    deck: Deck, number: int, roles: dict[Shape, dict[Role, list[int]]], seeded: random.Random
) -> Trial:
    # In turns, so that each shape has as many.
    shape = deck.shapes[number % len(deck.shapes)]
    role = seeded.choice(sorted(roles[shape]))
    strike = Strike(
        fault=deck.fault,
        role=role,
        rank=seeded.choice(roles[shape][role]),
        at=seeded.uniform(_EARLIEST, _LATEST),
        returns=deck.fault is Fault.KILL and role is not Role.SOURCE and seeded.random() < deck.returns,
    )
    damage = deck.damage if seeded.random() < deck.damaged else 0.0
    return Trial(name=f"{shape} struck {number}", shape=shape, strike=strike, damage=damage)


def roles_of(planner: str, deck: Deck) -> dict[Role, list[int]]:
    """Ranks by the roles that there are: in the binomial pipeline all targets pass something on."""
    shape = CastShape(nodes=deck.nodes, sources=tuple(range(deck.sources)), blocks=deck.blocks)
    plan = PLANNERS[planner].plan(shape)
    found: dict[Role, list[int]] = {Role.SOURCE: list(shape.sources)}
    for target in shape.targets:
        role = Role.RELAY if len(plan.sends(target)) else Role.TARGET
        found.setdefault(role, []).append(target)
    return found
