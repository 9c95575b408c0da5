"""How many threads torch computes with."""

import torch


def set_compute_threads(count: int) -> None:
    """Fix it for this process, before its first computation and after any fork."""
    torch.set_num_threads(count)
