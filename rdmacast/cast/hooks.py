"""The hooks of a cast's caller for each block."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from rdmacast.transport import Check

OnBlock = Callable[[int, int], None]
Prepare = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHooks:
    """Callbacks for each block, as (offset, nbytes) or (offset, view) of the region.

    `prepare` runs in a thread of `executor` (None: the loop's) before a block is first written to. `check`
    runs in a thread on each block that arrived, or on one piece of `check_bytes` after the other where the
    transport supports this, and returns the indexes of damaged units. `on_block` then runs on the event loop,
    in the order in which good blocks arrive. What a hook raises ends the cast.
    """

    check: Check
    check_bytes: int | None = None
    prepare: Prepare | None = None
    on_block: OnBlock | None = None
    executor: Executor | None = None
