"""A planner that all casts are told to use, for experiments: else one is chosen for each."""

from dataclasses import dataclass, replace

from rdmacast.planners.automatic import comes_in_turn
from rdmacast.planners.catalog import PLANNERS
from registry.cast import CastRecord
from registry.errors import InvalidRecord
from registry.images.manifest import UNIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """`blocks` None: as many as were chosen."""

    planner: str
    blocks: int | None = None

    def of(self, cast: CastRecord, bytes_per_s: float) -> CastRecord:
        """The cast by this planner, in so many blocks of whole units, over links of `bytes_per_s`."""
        blocks = self.blocks or -(-cast.nbytes // cast.block_bytes)
        block_bytes = -(-cast.nbytes // (blocks * UNIT_BYTES)) * UNIT_BYTES
        return replace(
            cast,
            planner=self.planner,
            block_bytes=block_bytes,
            reason=f"{self.planner}, as the gateway was told",
            edge=(),
            in_turn=comes_in_turn(self.planner, block_bytes, bytes_per_s),
        )


def parse_fixed_plan(text: str) -> FixedPlan:
    """`PLANNER` or `PLANNER/BLOCKS`. Raises InvalidRecord."""
    planner, slash, blocks = text.partition("/")
    count = int(blocks) if blocks.isascii() and blocks.isdigit() and len(blocks) < 6 else 0
    if planner not in PLANNERS or (slash and count < 1):
        raise InvalidRecord(f"{text!r} is none of {', '.join(PLANNERS)}, with /BLOCKS for so many blocks")
    return FixedPlan(planner=planner, blocks=count or None)
