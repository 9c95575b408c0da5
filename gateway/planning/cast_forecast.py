"""When a cast's first target has all, and when its first pipeline does, by the cast's plan (pure)."""

from dataclasses import dataclass
from functools import lru_cache

from rdmacast.pipelines import pipelines
from rdmacast.plan import CastShape
from rdmacast.planners.catalog import PLANNERS
from registry.cast import CastRecord

_MOST_TRANSFERS = 1 << 12  # of a plan that is looked at: a millisecond or two
_FEWEST_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CastForecast:
    """Both in copies: 1 is the time that one copy of the image takes over one link."""

    whole: float
    pipeline: float


def forecast(record: CastRecord) -> CastForecast:
    """Of a large cast by a plan of coarser blocks, whose first steps count for more."""
    blocks = -(-record.nbytes // record.block_bytes)
    most = max(_FEWEST_BLOCKS, _MOST_TRANSFERS // record.planned)
    return _forecast(record.planner, record.planned, record.sources, min(blocks, most))


@lru_cache(maxsize=256)
def _forecast(planner: str, nodes: int, sources: tuple[int, ...], blocks: int) -> CastForecast:
    plan = PLANNERS[planner].plan(CastShape(nodes=nodes, sources=sources, blocks=blocks))
    arrived = plan.arrivals()[list(plan.shape.targets)]
    return CastForecast(
        whole=int(arrived.max(axis=1).min()) / blocks, pipeline=pipelines(plan)[0].ready_step / blocks
    )
