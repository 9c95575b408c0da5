"""What gloo's broadcast of a model takes over the links of a testbed."""

from pathlib import Path

from benchmarks.multicast_peers import gloo
from benchmarks.multicast_run import CastImage
from benchmarks.testbed import Testbed

_SEED = 1


def broadcast_s(testbed: Testbed, folder: Path, targets: int, nbytes: int, patience_s: float) -> float:
    """Seconds until all of `targets` hosts have it from one, its processes being there and connected before.
    Raises CrewError, WrongBytes."""
    with gloo(testbed, targets + 1, folder) as contender:
        return contender.run(CastImage.make(nbytes, _SEED), "", patience_s).seconds
