"""The time of gloo's broadcast of a model over a testbed's links."""

from pathlib import Path

from benchmarks.multicast.peers import gloo
from benchmarks.multicast.run import CastImage
from benchmarks.testbed.network import Testbed

_SEED = 1


def broadcast_s(testbed: Testbed, folder: Path, targets: int, nbytes: int, patience_s: float) -> float:
    """Return the seconds of a broadcast from one host to `targets` others that are already connected.

    Raises CrewError, DigestMismatch.
    """
    with gloo(testbed, targets + 1, folder) as contender:
        return contender.run(CastImage.make(nbytes, _SEED), "", patience_s).seconds
