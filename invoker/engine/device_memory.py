"""Torch views of memory that torch did not allocate."""

import torch

from invoker.engine.contract import DeviceRegion


class _CudaBytes:
    """The CUDA array interface (v3) of a region, so that `torch.as_tensor` views it without a copy."""

    def __init__(self, region: DeviceRegion) -> None:
        self.region = region  # keeps the region alive as long as the tensor
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.pointer, False),
            "version": 3,
        }


def kv_memory(kv: DeviceRegion | int, device: torch.device) -> torch.Tensor:
    """Return the memory of a KV cache as bytes: a region of an arena, or a number of bytes to allocate."""
    if isinstance(kv, int):
        return torch.empty(kv, dtype=torch.uint8, device=device)
    return region_bytes(kv)


def region_bytes(region: DeviceRegion) -> torch.Tensor:
    """Return the whole region as a flat uint8 tensor, a view."""
    if region.device == "meta":
        return torch.empty(region.nbytes, dtype=torch.uint8, device="meta")
    if region.buffer is not None:
        return torch.frombuffer(region.buffer, dtype=torch.uint8, count=region.nbytes)
    return torch.as_tensor(_CudaBytes(region), device=torch.device(region.device))
