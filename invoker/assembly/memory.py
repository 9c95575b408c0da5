"""The node's memory: its arena, and its host's tier."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from invoker.assembly.setup import NodeSetup
from invoker.device import (
    DeviceFacts,
    default_arena_bytes,
    default_host_bytes,
    default_spare_bytes,
    detect_device,
    usable_cores,
)
from invoker.emulated.arena import EmulatedArena
from invoker.engine.compute_threads import set_compute_threads
from invoker.host_tier.folder import MODELS
from invoker.host_tier.model_folders import ModelFolders
from invoker.host_tier.tier import HostTier
from invoker.memory.arena import Arena, CpuArena
from invoker.memory.cuda_arena import CudaArena
from invoker.scratch import scratch_folder
from invoker.settings import Settings
from rdmacast.aio.threads import run_in_thread
from registry.config.devices import gpu_indices
from registry.config.emulation import is_emulated, parse_device

log = logging.getLogger("invoker.assembly")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The device of a node, its arena, its host's tier and the folders with links into that."""

    facts: DeviceFacts
    arena: Arena
    tier: HostTier
    folders: ModelFolders


async def open_memory(setup: NodeSetup, stack: AsyncExitStack) -> Memory:
    settings = setup.settings
    facts = await run_in_thread(detect_device, settings.device)
    set_compute_threads(settings.threads or max(1, usable_cores() // settings.nodes_hint))
    nbytes = settings.gpu_memory_bytes or default_arena_bytes(facts, settings.nodes_hint)
    log.info("arena: %d bytes on %s (%s)", nbytes, facts.device, facts.gpu_type)
    arena = (setup.make_arena or _make_arena)(facts, nbytes)
    stack.callback(arena.close)
    tier = await run_in_thread(_make_tier, settings, setup.root / settings.host_id)
    stack.callback(tier.close)
    return Memory(facts=facts, arena=arena, tier=tier, folders=open_folders(tier, stack))


def open_folders(tier: HostTier, stack: AsyncExitStack) -> ModelFolders:
    folders = ModelFolders(tier, stack.enter_context(scratch_folder(tier.directory / MODELS)))
    stack.callback(folders.close_all)
    return folders


def _make_arena(facts: DeviceFacts, nbytes: int) -> Arena:
    if facts.device == "cpu":
        return CpuArena(nbytes)
    if is_emulated(facts.device):
        return EmulatedArena(parse_device(facts.device), nbytes)
    return CudaArena(gpu_indices(facts.device)[0], nbytes)


def _make_tier(settings: Settings, folder: Path) -> HostTier:
    nbytes = settings.host_memory_bytes or default_host_bytes(settings.shm_dir, settings.nodes_hint)
    spare_bytes = settings.spare_memory_bytes
    if spare_bytes is None:
        spare_bytes = default_spare_bytes(nbytes, settings.nodes_hint)
    return HostTier(folder, nbytes, spare_bytes=spare_bytes)
