"""The number of threads that torch computes with."""

import torch


def set_compute_threads(count: int) -> None:
    """Set the number of threads of this process, before its first computation and after any fork."""
    torch.set_num_threads(count)
