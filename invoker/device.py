"""Properties of the accelerator and the machine's memory, and default sizes derived from them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from invoker.base.errors import SettingsError
from invoker.emulated.profiles import find_device
from registry.config.devices import gpu_indices
from registry.config.emulation import is_emulated, parse_device

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Properties of a node's device: `cpu`, `cuda:N`, `cuda:N,M` or `emulated:…`.

    `gpu_type` is its name in prices and usage. Of several GPUs, which are alike, the memory is the first
    one's: the arena is there.
    """

    device: str
    gpu_type: str
    memory_bytes: int
    free_bytes: int
    gpu_count: int = 1


def detect_device(wanted: str) -> DeviceFacts:
    """Return the properties of a device; for `auto`, of the first CUDA device or else the CPU.

    Raises SettingsError if a CUDA device is named and cannot be used.
    """
    if wanted == "cpu":
        return _cpu_facts()
    if is_emulated(wanted):
        return _emulated_facts(wanted)
    indices = (0,) if wanted == "auto" else gpu_indices(wanted)
    try:
        return alike([_cuda_facts(index) for index in indices])
    except SettingsError:
        if wanted == "auto":
            return _cpu_facts()
        raise


def alike(gpus: Sequence[DeviceFacts]) -> DeviceFacts:
    """Return the properties of a node's GPUs together. Raises SettingsError if they are of several types."""
    first, *others = gpus
    for other in others:
        if other.gpu_type != first.gpu_type:
            raise SettingsError(
                f"the GPUs of a node must be alike: {first.device} is a {first.gpu_type}, "
                f"{other.device} a {other.gpu_type}"
            )
    indices = ",".join(gpu.device.partition(":")[2] for gpu in gpus)
    return replace(first, device=f"cuda:{indices}", gpu_count=len(gpus))


def default_arena_bytes(facts: DeviceFacts, nodes_on_machine: int) -> int:
    """Return the default arena size: on a CPU at most 2 GiB and the node's share of 1/4 of memory.

    90 % of a GPU.
    """
    if facts.device == "cpu":
        return min(2 * GIB, facts.memory_bytes // 4 // max(1, nodes_on_machine))
    return facts.free_bytes * 9 // 10


def default_host_bytes(shm_dir: Path, nodes_on_machine: int) -> int:
    """Return the default host tier size: 1/4 of the shared-memory file system, less for over 3 nodes."""
    stat = os.statvfs(_existing(shm_dir))
    total = stat.f_blocks * stat.f_frsize
    return min(total // 4, total * 3 // 4 // max(1, nodes_on_machine))


def default_spare_bytes(host_bytes: int, nodes_on_machine: int) -> int:
    """Return the default pre-faulted bytes: at most 1 GiB and the node's share of 1/4 of the tier."""
    return min(GIB, host_bytes // 4 // max(1, nodes_on_machine))


def default_vllm_bytes(nodes_on_machine: int) -> int:
    """Return the default memory of a node's vLLM servers together: its share of half of the machine's."""
    return psutil.virtual_memory().total // 2 // max(1, nodes_on_machine)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def slug(name: str) -> str:
    """Return a device name as an identifier: `NVIDIA H200` becomes `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_facts() -> DeviceFacts:
    memory = psutil.virtual_memory()
    return DeviceFacts(
        device="cpu", gpu_type="cpu", memory_bytes=int(memory.total), free_bytes=int(memory.available)
    )


def _emulated_facts(wanted: str) -> DeviceFacts:
    device = parse_device(wanted)
    gpu, _ = find_device(device)
    nbytes = device.count * gpu.memory_bytes // device.scale
    return DeviceFacts(
        device=wanted, gpu_type=f"emulated-{slug(gpu.name)}", memory_bytes=nbytes, free_bytes=nbytes
    )


def _cuda_facts(index: int) -> DeviceFacts:
    try:
        import cupy
    except ImportError as error:
        raise SettingsError(
            f"--device cuda:{index} needs cupy: pip install 'hypercast[gpu]' (or [gpu13] for CUDA 13)"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        name = runtime.getDeviceProperties(index)["name"].decode()
        with cupy.cuda.Device(index):
            free, total = runtime.memGetInfo()
    except runtime.CUDARuntimeError as error:
        raise SettingsError(f"cannot use cuda:{index}: {error}") from error
    return DeviceFacts(
        device=f"cuda:{index}", gpu_type=slug(name), memory_bytes=int(total), free_bytes=int(free)
    )


def _existing(path: Path) -> Path:
    """Return `path` or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return path
