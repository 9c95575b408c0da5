"""A pull: a cast with one target, which only this node knows of."""

from collections.abc import Sequence

from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.cast.spec import CastSpec
from rdmacast.protocol.pull_report import MAX_SLOW

_TARGET = CastMember(node="", host="", address="")


def pull_spec(image: str, nbytes: int, block_bytes: int, holders: Sequence[CastMember]) -> CastSpec:
    """Return the cast from the holders to the node named `""`: all from the first while that serves it.

    The holders are taken to hold everything: reads from one that is still loading wait there.
    """
    holders = holders[:MAX_SLOW]
    plan = CastPlan(
        cast_id="pull",
        image=image,
        nbytes=nbytes,
        block_bytes=block_bytes,
        planner="chain",
        members=(*holders, _TARGET),
        sources=tuple(range(len(holders))),
        planned=len(holders) + 1,
        edge=tuple(range(1, len(holders))),
    )
    return CastSpec(plan=plan, is_pull=True)


def pull_settings(timeout_s: float) -> SessionSettings:
    """Return the settings of a pull that leaves a source once a read fails or takes too long."""
    return SessionSettings(pull_timeout_s=timeout_s, min_silence_s=timeout_s, max_failures=1)
