"""What the instances of a node use: their context, vLLM and handlers."""

import logging
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from invoker.assembly.images import Images
from invoker.assembly.memory import Memory, open_folders
from invoker.assembly.setup import NodeSetup
from invoker.base.errors import SettingsError
from invoker.device import default_vllm_bytes
from invoker.handlers.process import HandlerProcess
from invoker.instances.load_feed import LoadFeed
from invoker.instances.start_context import InstanceContext, MakeHandler, OpenGroup
from invoker.loading.attach import socket_path
from invoker.loading.engine_images import EngineImages
from invoker.log_rings import LogRings
from invoker.memory.arena import Arena
from invoker.metering.meter import GpuMeter
from invoker.scratch import scratch_folder
from invoker.settings import Settings
from invoker.vllm.forking import make_zygote
from invoker.vllm.host import VllmHost, has_module
from registry.config.emulation import is_emulated

log = logging.getLogger("invoker.assembly")


def instance_context(
    setup: NodeSetup,
    arena: Arena,
    images: Images,
    meter: GpuMeter,
    rings: LogRings,
    vllm: VllmHost | None,
    open_group: OpenGroup,
    stack: AsyncExitStack,
) -> InstanceContext:
    scratch = Path(tempfile.gettempdir()) / f"hypercast-handlers-{setup.config.cluster_id}"
    return InstanceContext(
        arena=arena,
        device_cache=images.device_cache,
        loader=images.loader,
        engines=setup.engines,
        make_handler=_handler_maker(setup.settings),
        scratch_dir=stack.enter_context(scratch_folder(scratch)),
        clock=setup.clock,
        meter=meter,
        loads=LoadFeed(setup.clock),
        log_line=rings.add,
        engine_images=EngineImages(images.loader, setup.state, setup.settings.node_id),
        open_group=open_group,
        vllm=vllm,
    )


async def open_vllm(setup: NodeSetup, memory: Memory, stack: AsyncExitStack) -> VllmHost | None:
    """Return what the node needs for vLLM, None if it has no vLLM. Raises SettingsError."""
    settings, facts = setup.settings, memory.facts
    if settings.vllm_python is None or is_emulated(facts.device):
        return None
    if not await has_module(settings.vllm_python, "vllm"):
        raise SettingsError(
            f"--vllm-python {settings.vllm_python}: no Python that has vLLM (make install-vllm makes one)"
        )
    parent = Path(tempfile.gettempdir()) / f"hypercast-vllm-{setup.config.cluster_id}"
    scratch_dir = stack.enter_context(scratch_folder(parent))
    zygote = None
    if not settings.no_vllm_preload:
        made = make_zygote(settings.vllm_python, facts.device, scratch_dir / "zygote")
        zygote = await stack.enter_async_context(made.running())
    return VllmHost(
        python=settings.vllm_python,
        memory_bytes=settings.vllm_memory_bytes or default_vllm_bytes(settings.nodes_hint),
        device=facts.device,
        scratch_dir=scratch_dir,
        folders=open_folders(memory.tier, stack),
        attach=socket_path(setup.root, settings.node_id)
        if await has_module(settings.vllm_python, "hypercast_vllm")
        else None,
        zygote=zygote,
    )


def _handler_maker(settings: Settings) -> MakeHandler | None:
    if not settings.allow_handlers:
        return None
    for part in settings.sandbox.missing():
        log.warning("handlers are not confined: this machine lacks %s", part)
    return partial(HandlerProcess, sandbox=settings.sandbox)
