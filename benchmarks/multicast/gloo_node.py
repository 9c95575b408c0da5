"""A rank of `torch.distributed` with gloo: `python -m benchmarks.gloo_node SOCKET RANK SIZE ADDRESS PORT`."""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.crew_member import Bytes, serve
from benchmarks.crew_messages import Done
from benchmarks.testbed_plan import INTERFACE


class GlooMember:
    """Broadcasts as any program that uses torch would."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def room(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def cast(self, image: Bytes) -> Done:
        tensor = torch.from_numpy(image)
        dist.barrier()
        began_s = time.monotonic()
        dist.broadcast(tensor, src=0)
        return Done(began_s=began_s, ended_s=time.monotonic())


def main() -> None:
    path, rank, size, address, port = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=int(rank), world_size=int(size)
    )
    try:
        serve(path, GlooMember())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
