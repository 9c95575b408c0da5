"""Opens a node's transports, as server and as client."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from invoker.base.errors import SettingsError
from invoker.memory.arena import Arena
from invoker.memory.cuda_arena import CudaArena
from invoker.memory.staged_arena import StagedArena
from invoker.settings import Settings
from rdmacast.errors import DeviceError, NoTransport
from rdmacast.exporter import Exporter
from rdmacast.link_rate import LinkRate, interface_rate
from rdmacast.protocol.tls import NodeTls
from rdmacast.transport import Transport
from rdmacast.transports.connector import Connector
from rdmacast.transports.cuda_ipc.cupy_driver import CupyDriver
from rdmacast.transports.cuda_ipc.driver import IpcDriver
from rdmacast.transports.cuda_ipc.exporter import CudaIpcExporter
from rdmacast.transports.cuda_ipc.transport import CudaIpcTransport
from rdmacast.transports.kept_links import KeptLinks
from rdmacast.transports.nixl.exporter import NixlExporter
from rdmacast.transports.nixl.node import NixlNode, open_nixl
from rdmacast.transports.nixl.transport import NixlTransport
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.node import VerbsNode, open_node
from rdmacast.transports.verbs.transport import VerbsTransport
from registry.config.tls import open_tls

log = logging.getLogger("invoker.transports")


@dataclass(frozen=True, slots=True, kw_only=True)
class CastTransports:
    """This node's transports, each with the reason if it is not available.

    `cuda_ipc` exports a GPU's arena to other processes of the host.
    """

    tls: NodeTls
    verbs: VerbsNode | str
    nixl: NixlNode | str
    gpu: IpcDriver | str
    cuda_ipc: CudaIpcExporter | None

    def quarantined_bytes(self) -> int:
        """Return the bytes of memory that an RDMA device refused to release."""
        return 0 if isinstance(self.verbs, str) else self.verbs.memory.quarantine.nbytes

    @property
    def exporters(self) -> list[Exporter]:
        """By which other nodes read from this one, besides TCP and shared memory."""
        exporters: list[Exporter] = []
        if not isinstance(self.verbs, str):
            exporters.append(VerbsExporter(self.verbs))
        if self.cuda_ipc is not None:
            exporters.append(self.cuda_ipc)
        if not isinstance(self.nixl, str):
            exporters.append(NixlExporter(self.nixl))
        return exporters


def open_transports(settings: Settings, arena: Arena, stack: AsyncExitStack) -> CastTransports:
    """Open the transports, closed with `stack` before the arena.

    Raises SettingsError if a required one fails, InvalidRecord if files for TLS do.
    """
    tls, verbs = open_tls(settings.tls.cast, "casts"), open_rdma(settings, stack)
    nixl = open_nixl_node(settings, stack)
    gpu: IpcDriver | str = "this node has no GPU"
    cuda_ipc = None
    if isinstance(arena, StagedArena) and isinstance(verbs, VerbsNode):
        register_arena(verbs, arena, stack)
    if isinstance(arena, CudaArena):
        gpu = _gpu_driver(arena.device_index)
        cuda_ipc = (
            None if isinstance(gpu, str) else export_arena(gpu, arena.base, arena.capacity_bytes, stack)
        )
    return CastTransports(tls=tls, verbs=verbs, nixl=nixl, gpu=gpu, cuda_ipc=cuda_ipc)


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


def open_nixl_node(settings: Settings, stack: AsyncExitStack) -> NixlNode | str:
    if not settings.nixl:
        return ""
    try:
        return stack.enter_context(open_nixl())
    except (NoTransport, DeviceError) as error:
        raise SettingsError(f"--nixl: {error}") from error


def register_arena(verbs: VerbsNode, arena: StagedArena, stack: AsyncExitStack) -> None:
    """Register a GPU's arena for RDMA, if the machine supports it, and its page-locked memory."""
    try:
        stack.enter_context(verbs.memory.add(arena.pinned))
    except DeviceError as error:
        log.warning("no RDMA through the page-locked memory of this node: %s", error)
    try:
        stack.enter_context(verbs.memory.add_gpu(arena.base, arena.capacity_bytes))
    except DeviceError as error:
        log.info("no RDMA from the memory of %s: %s", arena.device, error)


def export_arena(driver: IpcDriver, base: int, nbytes: int, stack: AsyncExitStack) -> CudaIpcExporter | None:
    exporter = CudaIpcExporter(driver)
    try:
        stack.enter_context(exporter.added(base, nbytes))
    except DeviceError as error:
        log.info("no CUDA IPC from the memory of this GPU: %s", error)
        return None
    return exporter


def make_connector(settings: Settings, root: Path, opened: CastTransports) -> Connector:
    """Return the connector by which this node reads from others."""
    secret, tls = settings.secret, opened.tls.client
    transports: list[Transport] = [ShmTransport(secret, root=root, tls=tls)]
    absent = {}
    if isinstance(opened.gpu, str):
        absent["cuda_ipc"] = opened.gpu
    else:
        transports.append(CudaIpcTransport(secret, opened.gpu, tls=tls))
    if isinstance(opened.verbs, str):
        absent["verbs"] = opened.verbs
    else:
        transports.append(VerbsTransport(secret, opened.verbs, tls=tls))
    if not isinstance(opened.nixl, str):
        transports.append(NixlTransport(secret, opened.nixl, tls=tls))
    if settings.rdma_required:
        absent["tcp"] = "--require-rdma"
    else:
        transports.append(TcpTransport(secret, link_rate_bytes_s=settings.link_rate_bytes_s, tls=tls))
    return Connector(
        settings.host_id,
        transports,
        absent=absent,
        port_rate=_port_rate(settings, opened),
        kept=KeptLinks(),
    )


def _port_rate(settings: Settings, opened: CastTransports) -> LinkRate | None:
    """Return the speed of the port over which others read from this node; None if unknown."""
    if isinstance(opened.verbs, VerbsNode):
        return opened.verbs.port_rate
    return interface_rate(settings.advertise) if isinstance(opened.nixl, str) else None


def _gpu_driver(device_index: int) -> IpcDriver | str:
    try:
        return CupyDriver(device_index)
    except DeviceError as error:
        return str(error)
