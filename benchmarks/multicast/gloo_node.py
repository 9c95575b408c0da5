"""Run a gloo rank: `python -m benchmarks.multicast.gloo_node SOCKET RANK SIZE ADDRESS PORT`."""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.multicast.messages import CastFinished
from benchmarks.multicast.rank import Bytes, serve_rank
from benchmarks.testbed.plan import INTERFACE


class GlooRank:
    """A rank that broadcasts with torch.distributed."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def allocate(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def cast(self, image: Bytes) -> CastFinished:
        tensor = torch.from_numpy(image)
        dist.barrier()
        started_s = time.monotonic()
        dist.broadcast(tensor, src=0)
        return CastFinished(started_s=started_s, ended_s=time.monotonic())


def main() -> None:
    path, rank, size, address, port = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=int(rank), world_size=int(size)
    )
    try:
        serve_rank(path, GlooRank())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
