"""A planner forced on all casts, for experiments; otherwise one is chosen for each cast."""

from dataclasses import dataclass, replace

from rdmacast.plan.planners.automatic import uses_slots
from rdmacast.plan.planners.catalog import PLANNERS
from registry.errors import InvalidRecord
from registry.images.manifest import UNIT_BYTES
from registry.records.cast import CastRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """A planner and a number of blocks; `blocks` None leaves the chosen number."""

    planner: str
    blocks: int | None = None

    def apply(self, cast: CastRecord, bytes_per_s: float) -> CastRecord:
        """Return the cast with this planner and number of blocks, over links of `bytes_per_s`."""
        blocks = self.blocks or -(-cast.nbytes // cast.block_bytes)
        block_bytes = -(-cast.nbytes // (blocks * UNIT_BYTES)) * UNIT_BYTES
        return replace(
            cast,
            planner=self.planner,
            block_bytes=block_bytes,
            reason=f"{self.planner}, set by --cast-planner",
            edge=(),
            in_slots=uses_slots(self.planner, block_bytes, bytes_per_s),
        )


def parse_fixed_plan(text: str) -> FixedPlan:
    """Parse `PLANNER` or `PLANNER/BLOCKS`. Raises InvalidRecord."""
    planner, slash, blocks = text.partition("/")
    count = int(blocks) if blocks.isascii() and blocks.isdigit() and len(blocks) < 6 else 0
    if planner not in PLANNERS or (slash and count < 1):
        raise InvalidRecord(
            f"unknown cast planner {text!r}: use one of {', '.join(PLANNERS)}, optionally with /BLOCKS"
        )
    return FixedPlan(planner=planner, blocks=count or None)
