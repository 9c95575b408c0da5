"""The ends of a node's transports: what others read from it by, and what it reads from them by."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from invoker.arena import Arena
from invoker.cuda_arena import CudaArena
from invoker.errors import SettingsError
from invoker.settings import Settings
from rdmacast.connector import Connector
from rdmacast.cuda_ipc import CudaIpcTransport
from rdmacast.cuda_ipc_cupy import CupyDriver
from rdmacast.cuda_ipc_driver import IpcDriver
from rdmacast.cuda_ipc_lender import GpuLender
from rdmacast.errors import DeviceError, NoTransport
from rdmacast.nixl import NixlTransport
from rdmacast.nixl_node import NixlNode, open_nixl
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.tls import NodeTls, load_tls
from rdmacast.transport import Transport
from rdmacast.verbs import VerbsTransport
from rdmacast.verbs_node import VerbsNode, open_node

log = logging.getLogger("invoker.cast_ends")


@dataclass(frozen=True, slots=True, kw_only=True)
class CastEnds:
    """This node's end of each transport, or why there is none. `lender` lends the arena of a GPU."""

    tls: NodeTls
    verbs: VerbsNode | str
    nixl: NixlNode | str
    gpu: IpcDriver | str
    lender: GpuLender | None

    @property
    def verbs_node(self) -> VerbsNode | None:
        return None if isinstance(self.verbs, str) else self.verbs

    @property
    def nixl_node(self) -> NixlNode | None:
        return None if isinstance(self.nixl, str) else self.nixl


def open_ends(settings: Settings, arena: Arena, stack: AsyncExitStack) -> CastEnds:
    """They are closed with the stack, before the arena. Raises SettingsError where one is required."""
    tls, verbs = open_tls(settings), open_rdma(settings, stack)
    nixl = open_nixl_of(settings, stack)
    gpu: IpcDriver | str = "this node has no GPU"
    lender = None
    if isinstance(arena, CudaArena):
        if isinstance(verbs, VerbsNode):
            register_arena(verbs, arena, stack)
        gpu = _gpu_driver(arena.device_index)
        lender = None if isinstance(gpu, str) else lend_arena(gpu, arena.base, arena.capacity_bytes, stack)
    return CastEnds(tls=tls, verbs=verbs, nixl=nixl, gpu=gpu, lender=lender)


def open_tls(settings: Settings) -> NodeTls:
    if settings.cast_tls is None:
        return NodeTls()
    try:
        return load_tls(settings.cast_tls)
    except OSError as error:
        files = settings.cast_tls
        raise SettingsError(
            f"TLS for casts by {files.cert}, {files.key} and {files.ca}: {error.strerror or error}"
        ) from error


def open_rdma(settings: Settings, stack: AsyncExitStack) -> VerbsNode | str:
    if settings.rdma == "off":
        return "--rdma off"
    if settings.link_rate_bytes_s is not None:
        return "--link-rate caps TCP only"
    try:
        wanted = None if settings.rdma == "auto" else settings.rdma
        return stack.enter_context(open_node(wanted, settings.advertise))
    except (NoTransport, DeviceError) as error:
        if settings.rdma_required or settings.rdma != "auto":
            raise SettingsError(f"no RDMA: {error}") from error
        log.info("no RDMA: %s", error)
        return str(error)


def open_nixl_of(
    settings: Settings, stack: AsyncExitStack, opened: Callable[[], NixlNode] = open_nixl
) -> NixlNode | str:
    if not settings.nixl:
        return ""
    try:
        return stack.enter_context(opened())
    except (NoTransport, DeviceError) as error:
        raise SettingsError(f"--nixl: {error}") from error


def register_arena(verbs: VerbsNode, arena: CudaArena, stack: AsyncExitStack) -> None:
    """Let peers read the whole arena of a GPU by RDMA, where the machine can."""
    try:
        stack.enter_context(verbs.memory.add_gpu(arena.base, arena.capacity_bytes))
    except DeviceError as error:
        log.info("no RDMA from the memory of %s: %s", arena.device, error)


def lend_arena(driver: IpcDriver, base: int, nbytes: int, stack: AsyncExitStack) -> GpuLender | None:
    lender = GpuLender(driver)
    try:
        stack.enter_context(lender.added(base, nbytes))
    except DeviceError as error:
        log.info("other nodes of this host cannot read this GPU's memory: %s", error)
        return None
    return lender


def make_connector(settings: Settings, root: Path, ends: CastEnds) -> Connector:
    """What this node reads from others by."""
    secret, tls = settings.secret, ends.tls.client
    transports: list[Transport] = [ShmTransport(secret, root=root, tls=tls)]
    absent = {}
    if isinstance(ends.gpu, str):
        absent["cuda_ipc"] = ends.gpu
    else:
        transports.append(CudaIpcTransport(secret, ends.gpu, tls=tls))
    if isinstance(ends.verbs, str):
        absent["verbs"] = ends.verbs
    else:
        transports.append(VerbsTransport(secret, ends.verbs, tls=tls))
    if not isinstance(ends.nixl, str):
        transports.append(NixlTransport(secret, ends.nixl, tls=tls))
    if settings.rdma_required:
        absent["tcp"] = "--require-rdma"
    else:
        transports.append(TcpTransport(secret, link_rate_bytes_s=settings.link_rate_bytes_s, tls=tls))
    return Connector(settings.host_id, transports, absent=absent)


def _gpu_driver(device_index: int) -> IpcDriver | str:
    try:
        return CupyDriver(device_index)
    except DeviceError as error:
        return str(error)
