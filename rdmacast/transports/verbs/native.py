"""An RDMA device through pyverbs, which is optional: imported only here, when a device is opened.

What of this has run, and where, is in docs/OPERATIONS.md ("RDMA and other transports").
"""

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rdmacast.errors import DeviceError, NoTransport
from rdmacast.transports.verbs.address import QueuePairAddress, RemoteMemory
from rdmacast.transports.verbs.device import Device, LocalMemory, ReadCompletion
from rdmacast.transports.verbs.gpu import exported
from rdmacast.transports.verbs.ports import Gid, Port, PortChoice, pick

logger = logging.getLogger(__name__)

DEPTH = 32
MAX_READS = 16  # that a queue pair answers at once
_TIMEOUT = 14  # of an acknowledgement: 4.096 us * 2**14 = 67 ms, then it is sent again
_RETRIES = 6  # 7 means without end on some devices
_HOPS = 64
# Gbit/s of a lane by the code of the speed, lanes by the code of the width.
_SPEEDS = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0, 256: 200.0}
_WIDTHS = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_MEANINGS = {
    "RETRY_EXC_ERR": "the peer does not answer",
    "REM_ACCESS_ERR": "the peer refuses access to that memory",
    "WR_FLUSH_ERR": "the queue pair had failed before",
    "LOC_PROT_ERR": "our own memory is not registered",
}


@dataclass(frozen=True, slots=True)
class _Pyverbs:
    """The modules of pyverbs. Untyped, as it has no types."""

    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    enums: Any
    error: Any

    @property
    def faults(self) -> dict[int, str]:
        """The names of faults by the status of a completion."""
        names = {name: name.removeprefix("IBV_WC_") for name in dir(self.enums) if name.endswith("_ERR")}
        return {
            int(getattr(self.enums, name)): f"{short}, {_MEANINGS[short]}" if short in _MEANINGS else short
            for name, short in names.items()
            if name.startswith("IBV_WC_")
        }


def _load() -> _Pyverbs:
    """Import pyverbs. Raises NoTransport if it or the libraries that it needs are absent."""
    try:
        try:
            enums = import_module("pyverbs.libibverbs_enums")
        except ModuleNotFoundError:
            enums = import_module("pyverbs.enums")  # before version 58
        names = ("addr", "cq", "device", "mr", "pd", "qp", "wr")
        modules = {name: import_module(f"pyverbs.{name}") for name in names}
        return _Pyverbs(**modules, enums=enums, error=import_module("pyverbs.pyverbs_error").PyverbsError)
    except ImportError as error:
        raise NoTransport(f"pyverbs cannot be imported: {error}") from error


@contextmanager
def _refusals(verbs: _Pyverbs, what: str) -> Iterator[None]:
    try:
        yield
    except verbs.error as error:
        raise DeviceError(f"{what}: {str(error).strip()}") from error


def open_device(wanted: str | None, address: str | None) -> tuple[Device, PortChoice]:
    """Open the best port (see `ports.pick`). Raises NoTransport, which names what is missing."""
    verbs = _load()
    try:
        with _refusals(verbs, "no RDMA device"):
            names = [device.name.decode() for device in verbs.device.get_device_list()]
            ports = [port for name in names for port in _ports(verbs, name)]
        chosen = pick(ports, wanted, address)
        return NativeDevice(verbs, chosen), chosen
    except DeviceError as error:
        raise NoTransport(str(error)) from error


def _ports(verbs: _Pyverbs, name: str) -> list[Port]:
    context = verbs.device.Context(name=name)
    try:
        count = context.query_device().phys_port_cnt
        return [_port(verbs, context, name, number) for number in range(1, count + 1)]
    finally:
        context.close()


def _port(verbs: _Pyverbs, context: Any, name: str, number: int) -> Port:
    reported = context.query_port(number)
    is_ethernet = reported.link_layer == verbs.enums.IBV_LINK_LAYER_ETHERNET
    roce_1 = verbs.enums.IBV_GID_TYPE_ROCE_V1
    gids = tuple(
        Gid(entry.gid_index, _gid(entry), not (is_ethernet and entry.gid_type == roce_1))
        for entry in context.query_gid_table(reported.gid_tbl_len)
        if entry.port_num == number
    )
    return Port(
        device=name,
        number=number,
        is_active=reported.state == verbs.enums.IBV_PORT_ACTIVE,
        is_ethernet=is_ethernet,
        lid=reported.lid,
        mtu_bytes=128 << reported.active_mtu,
        gbit_s=_SPEEDS.get(reported.active_speed, 0.0) * _WIDTHS.get(reported.active_width, 0),
        gids=gids,
    )


def _gid(entry: Any) -> bytes:
    return bytes.fromhex(entry.gid_str().replace(":", ""))


class NativeDevice:
    """A Device over one port."""

    def __init__(self, verbs: _Pyverbs, chosen: PortChoice) -> None:
        self.verbs = verbs
        self.chosen = chosen
        self.faults = verbs.faults
        port = chosen.port
        with _refusals(verbs, f"cannot open {port.name}"):
            self.context = verbs.device.Context(name=port.device)
            self.pd = verbs.pd.PD(self.context)
            reported = self.context.query_device()
            self._message_bytes = int(self.context.query_port(port.number).max_msg_sz)
        self._depth = min(DEPTH, reported.max_qp_wr - 1)
        self.answers = max(1, min(MAX_READS, reported.max_qp_rd_atom))
        self.asks = max(1, min(MAX_READS, reported.max_qp_init_rd_atom))

    def __repr__(self) -> str:
        return f"NativeDevice({self.chosen})"

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def message_bytes(self) -> int:
        return self._message_bytes

    def queue_pair(self) -> "NativePair":
        with _refusals(self.verbs, "cannot make a queue pair"):
            return NativePair(self)

    def register(self, address: int, nbytes: int, *, writable: bool) -> "NativeRegistration":
        with _refusals(self.verbs, f"cannot register {nbytes} bytes of memory"):
            region = self.verbs.mr.MR(self.pd, nbytes, self._access(writable), address=address)
        return NativeRegistration(region, address, nbytes, address)

    def register_gpu(self, address: int, nbytes: int) -> "NativeRegistration":
        try:
            return self._register_dmabuf(address, nbytes)
        except DeviceError as refused:
            # Without dma-buf, nvidia_peermem makes device pointers known to the adapters' drivers.
            try:
                registered = self.register(address, nbytes, writable=True)
            except DeviceError as error:
                raise DeviceError(f"no GPU memory for RDMA: {refused}; without dma-buf: {error}") from error
            logger.info("GPU memory is registered by peermem, as dma-buf is not to be had: %s", refused)
            return registered

    def close(self) -> None:
        _close(self.context)

    def _register_dmabuf(self, address: int, nbytes: int) -> "NativeRegistration":
        with exported(address, nbytes) as (file, offset):
            with _refusals(self.verbs, f"cannot register {nbytes} bytes of a dma-buf"):
                region = self.verbs.mr.DmaBufMR(self.pd, nbytes, self._access(True), file, offset)
        return NativeRegistration(region, address, nbytes, offset)  # it counts from the offset on

    def _access(self, writable: bool) -> int:
        enums = self.verbs.enums
        return int(enums.IBV_ACCESS_REMOTE_READ | (enums.IBV_ACCESS_LOCAL_WRITE if writable else 0))


class NativeRegistration:
    """A Registration by a memory region of the device."""

    def __init__(self, region: Any, address: int, nbytes: int, iova: int) -> None:
        self._region = region
        self.address = address
        self.nbytes = nbytes
        self.iova = iova
        self.lkey = int(region.lkey)
        self.rkey = int(region.rkey)

    def __repr__(self) -> str:
        return f"NativeRegistration({self.nbytes} bytes at {self.address:#x})"

    def close(self) -> None:
        _close(self._region)


class NativePair:
    """A QueuePair of type RC, with a completion queue of its own."""

    def __init__(self, device: NativeDevice) -> None:
        self._device = device
        verbs, port = device.verbs, device.chosen.port
        qp, depth = verbs.qp, device.depth
        self._cq = verbs.cq.CQ(device.context, depth + 1)
        cap = qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = qp.QPInitAttr(
            qp_type=verbs.enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=1
        )
        self._qp = qp.QP(device.pd, init)
        attr = qp.QPAttr(port_num=port.number)
        attr.qp_access_flags = verbs.enums.IBV_ACCESS_REMOTE_READ
        attr.pkey_index = 0
        self._qp.to_init(attr)
        self._address = QueuePairAddress(
            number=self._qp.qp_num,
            first_psn=secrets.randbits(24),
            lid=port.lid,
            mtu_bytes=port.mtu_bytes,
            reads=device.answers,
            gid=device.chosen.gid.value,
        )
        self._closed = False

    def __repr__(self) -> str:
        return f"NativePair({self._address.number}, {'closed' if self._closed else 'open'})"

    @property
    def address(self) -> QueuePairAddress:
        return self._address

    def connect(self, peer: QueuePairAddress) -> None:
        verbs = self._device.verbs
        enums = verbs.enums
        with _refusals(verbs, "cannot connect a queue pair"):
            attr = self._ready_to_receive(peer)
            attr.qp_state = enums.IBV_QPS_RTR
            mask = enums.IBV_QP_STATE | enums.IBV_QP_AV | enums.IBV_QP_PATH_MTU | enums.IBV_QP_DEST_QPN
            mask |= enums.IBV_QP_RQ_PSN | enums.IBV_QP_MAX_DEST_RD_ATOMIC | enums.IBV_QP_MIN_RNR_TIMER
            self._qp.modify(attr, mask)
            attr.qp_state = enums.IBV_QPS_RTS
            attr.sq_psn = self._address.first_psn
            attr.timeout = _TIMEOUT
            attr.retry_cnt = _RETRIES
            attr.rnr_retry = _RETRIES
            attr.max_rd_atomic = min(self._device.asks, peer.reads)
            mask = enums.IBV_QP_STATE | enums.IBV_QP_SQ_PSN | enums.IBV_QP_TIMEOUT | enums.IBV_QP_RETRY_CNT
            mask |= enums.IBV_QP_RNR_RETRY | enums.IBV_QP_MAX_QP_RD_ATOMIC
            self._qp.modify(attr, mask)

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        verbs = self._device.verbs
        with _refusals(verbs, "cannot post a READ"):
            request = verbs.wr.SendWR(
                wr_id=id,
                opcode=verbs.enums.IBV_WR_RDMA_READ,
                num_sge=1,
                sg=[verbs.wr.SGE(local.address, nbytes, local.lkey)],
                send_flags=verbs.enums.IBV_SEND_SIGNALED,
            )
            request.set_wr_rdma(remote.rkey, remote.address)
            self._qp.post_send(request)

    def poll(self) -> Sequence[ReadCompletion]:
        with _refusals(self._device.verbs, "cannot poll for completions"):
            _, ended = self._cq.poll(self._device.depth)
        return [ReadCompletion(int(one.wr_id), self._fault(one)) for one in ended or ()]

    def close(self) -> None:
        self._closed = True
        _close(self._qp)
        _close(self._cq)

    def _fault(self, ended: Any) -> str | None:
        if ended.status == self._device.verbs.enums.IBV_WC_SUCCESS:
            return None
        return self._device.faults.get(int(ended.status), f"status {ended.status}")

    def _ready_to_receive(self, peer: QueuePairAddress) -> Any:
        verbs, chosen = self._device.verbs, self._device.chosen
        gid = verbs.addr.GID(_gid_groups(peer.gid))
        route = verbs.addr.GlobalRoute(dgid=gid, sgid_index=chosen.gid.index, hop_limit=_HOPS)
        attr = verbs.qp.QPAttr(port_num=chosen.port.number)
        attr.qp_access_flags = verbs.enums.IBV_ACCESS_REMOTE_READ
        attr.path_mtu = min(peer.mtu_bytes, chosen.port.mtu_bytes).bit_length() - 8  # 256 bytes are 1
        attr.dest_qp_num = peer.number
        attr.rq_psn = peer.first_psn
        attr.max_dest_rd_atomic = self._device.answers
        attr.min_rnr_timer = 12
        attr.ah_attr = verbs.addr.AHAttr(
            port_num=chosen.port.number, is_global=int(chosen.port.is_ethernet), dlid=peer.lid, gr=route
        )
        return attr


def _gid_groups(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))


def _close(thing: Any) -> None:
    """Close an object; a device's refusal is logged, and the process continues."""
    try:
        thing.close()
    except Exception:  # whatever the binding raises, the rest is to be closed too
        logger.warning("closing %s (process %d) failed", type(thing).__name__, os.getpid(), exc_info=True)
