"""A planner that all casts are told to use, for experiments: else one is chosen for each."""

from dataclasses import dataclass, replace

from rdmacast.planners.catalog import PLANNERS
from registry.cast import CastRecord
from registry.errors import InvalidRecord
from registry.images.manifest import UNIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """`blocks` None: as many as were chosen."""

    planner: str
    blocks: int | None = None

    def of(self, cast: CastRecord) -> CastRecord:
        """The cast by this planner, in about so many blocks, of whole units."""
        blocks = self.blocks or -(-cast.nbytes // cast.block_bytes)
        return replace(
            cast,
            planner=self.planner,
            block_bytes=-(-cast.nbytes // (blocks * UNIT_BYTES)) * UNIT_BYTES,
            reason=f"{self.planner}, as the gateway was told",
            edge=(),
        )


def parse_fixed_plan(text: str) -> FixedPlan:
    """`PLANNER` or `PLANNER/BLOCKS`. Raises InvalidRecord."""
    planner, slash, blocks = text.partition("/")
    count = int(blocks) if blocks.isascii() and blocks.isdigit() and len(blocks) < 6 else 0
    if planner not in PLANNERS or (slash and count < 1):
        raise InvalidRecord(f"{text!r} is none of {', '.join(PLANNERS)}, with /BLOCKS for so many blocks")
    return FixedPlan(planner=planner, blocks=count or None)
