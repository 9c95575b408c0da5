"""The names of CUDA devices: `cuda:N`, and `cuda:N,M,…` for the GPUs of one node."""

import re

from registry.errors import InvalidRecord

MAX_GPUS = 64
_CUDA = re.compile(r"cuda(?::(\d{1,3}(?:,\d{1,3})*))?")


def is_cuda(device: str) -> bool:
    """Return whether a device is one or more GPUs, by its name."""
    return device.startswith("cuda")


def gpu_indices(device: str) -> tuple[int, ...]:
    """Return the indices of a node's GPUs, none for another device. Raises InvalidRecord."""
    if not is_cuda(device):
        return ()
    found = _CUDA.fullmatch(device)
    if found is None:
        raise InvalidRecord(f"{device!r} is not a CUDA device: use cuda:N, or cuda:N,M for several GPUs")
    indices = tuple(map(int, (found[1] or "0").split(",")))
    if len(set(indices)) != len(indices) or len(indices) > MAX_GPUS:
        raise InvalidRecord(f"{device!r} must name each GPU once, and at most {MAX_GPUS}")
    return indices
