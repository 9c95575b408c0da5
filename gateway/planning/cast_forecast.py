"""A forecast of a cast from its plan: when the first target and the first pipeline are complete. Pure."""

from dataclasses import dataclass
from functools import lru_cache

from rdmacast.plan.pipelines import pipelines
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.topology import NodeTopology
from registry.records.cast import CastRecord

_MAX_TRANSFERS = 1 << 12  # transfers of the plan that is simulated, in a millisecond or two
_MIN_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CastForecast:
    """Times in copies: 1 is the time of one copy of the image over one link."""

    whole: float
    pipeline: float


def forecast(record: CastRecord) -> CastForecast:
    """Forecast the cast; a large one by a plan of coarser blocks."""
    blocks = -(-record.nbytes // record.block_bytes)
    most = max(_MIN_BLOCKS, _MAX_TRANSFERS // record.planned)
    sites = record.sites[: record.planned]
    return _forecast(record.planner, record.planned, record.sources, min(blocks, most), sites)


@lru_cache(maxsize=256)
def _forecast(
    planner: str, nodes: int, sources: tuple[int, ...], blocks: int, sites: tuple[NodeTopology, ...]
) -> CastForecast:
    shape = CastShape(nodes=nodes, sources=sources, blocks=blocks, sites=sites)
    plan = PLANNERS[planner].plan(shape)
    arrived = plan.arrivals()[list(plan.shape.targets)]
    return CastForecast(
        whole=int(arrived.max(axis=1).min()) / blocks, pipeline=pipelines(plan)[0].ready_step / blocks
    )
