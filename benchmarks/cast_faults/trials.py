"""The casts of a run and the faults in them, drawn from a seed (pure)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS

# Faults before the first blocks and after the last have little effect.
_EARLIEST, _LATEST = 0.05, 0.95
UNDISTURBED = 3  # casts per variant
DAMAGED = 2  # casts per variant without a fault


class CastRole(StrEnum):
    """The role of a node in a cast."""

    SOURCE = "source"
    RELAY = "relay"  # a target that forwards blocks
    TARGET = "target"  # a target that forwards none


class FaultKind(StrEnum):
    """What is done to a node."""

    KILL = "kill"  # kill -9
    HANG = "hang"  # SIGSTOP: connections stay open, like a host whose cable was pulled


@dataclass(frozen=True, slots=True, order=True)
class CastVariant:
    """Casts that take equal time while undisturbed."""

    transport: str
    planner: str

    def __str__(self) -> str:
        return f"{self.transport} {self.planner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault of a node after the fraction `at` of an undisturbed cast.

    With `returns` the node comes back at once, with the content of its memory's file.
    """

    fault: FaultKind
    role: CastRole
    rank: int
    at: float
    returns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrial:
    """One cast; `damage` is the fraction of blocks in which a byte is flipped."""

    name: str
    shape: CastVariant
    strike: InjectedFault | None = None
    damage: float = 0.0

    @property
    def is_undisturbed(self) -> bool:
        return self.strike is None and not self.damage

    def __str__(self) -> str:
        strike, text = self.strike, str(self.shape)
        if strike is not None:
            text += f", {strike.fault} of {strike.role} {strike.rank} at {strike.at:.0%}"
            text += ", which returns" if strike.returns else ""
        return text + (f", {self.damage:.0%} of blocks damaged" if self.damage else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMix:
    """What trials are drawn from: `casts` with a fault; `damaged` and `returns` are fractions of them."""

    casts: int
    nodes: int
    sources: int
    blocks: int
    shapes: Sequence[CastVariant]
    fault: FaultKind = FaultKind.KILL
    damage: float = 0.01
    damaged: float = 0.5
    returns: float = 0.25
    undisturbed: int = UNDISTURBED
    only_damaged: int = DAMAGED

    def __post_init__(self) -> None:
        if not 2 <= self.sources < self.nodes:
            raise ValueError("sources must be 2 or more, because one may be killed, and below nodes")


def draw_trials(mix: FaultMix, seed: int) -> list[FaultTrial]:
    """Return an undisturbed cast of each variant, then all others in random order."""
    seeded = random.Random(seed)
    first = [FaultTrial(name=f"{shape} first", shape=shape) for shape in mix.shapes]
    others = [
        FaultTrial(name=f"{shape} {kind} {number}", shape=shape, damage=damage)
        for shape in mix.shapes
        for kind, count, damage in (
            ("undisturbed", mix.undisturbed - 1, 0.0),
            ("damaged", mix.only_damaged, mix.damage),
        )
        for number in range(count)
    ]
    roles = {shape: roles_of(shape.planner, mix) for shape in mix.shapes}
    others += [_faulted_trial(mix, number, roles, seeded) for number in range(mix.casts)]
    seeded.shuffle(others)
    return first + others


def _faulted_trial(
    mix: FaultMix, number: int, roles: dict[CastVariant, dict[CastRole, list[int]]], seeded: random.Random
) -> FaultTrial:
    # Round robin: equal counts per variant.
    shape = mix.shapes[number % len(mix.shapes)]
    role = seeded.choice(sorted(roles[shape]))
    strike = InjectedFault(
        fault=mix.fault,
        role=role,
        rank=seeded.choice(roles[shape][role]),
        at=seeded.uniform(_EARLIEST, _LATEST),
        returns=mix.fault is FaultKind.KILL and role is not CastRole.SOURCE and seeded.random() < mix.returns,
    )
    damage = mix.damage if seeded.random() < mix.damaged else 0.0
    return FaultTrial(name=f"{shape} struck {number}", shape=shape, strike=strike, damage=damage)


def roles_of(planner: str, mix: FaultMix) -> dict[CastRole, list[int]]:
    """Return ranks by role; in the binomial pipeline all targets forward blocks."""
    shape = CastShape(nodes=mix.nodes, sources=tuple(range(mix.sources)), blocks=mix.blocks)
    plan = PLANNERS[planner].plan(shape)
    found: dict[CastRole, list[int]] = {CastRole.SOURCE: list(shape.sources)}
    for target in shape.targets:
        role = CastRole.RELAY if len(plan.sends(target)) else CastRole.TARGET
        found.setdefault(role, []).append(target)
    return found
