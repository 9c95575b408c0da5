"""Queue pairs, registrations and grants of a device through pyverbs."""

import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rdmacast.errors import DeviceError
from rdmacast.transports.verbs.address import QueuePairAddress, RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory, ReadCompletion, Registration
from rdmacast.transports.verbs.gpu import exported
from rdmacast.transports.verbs.ports import PortChoice
from rdmacast.transports.verbs.pyverbs_modules import Pyverbs, refusals

logger = logging.getLogger(__name__)

_TIMEOUT = 14  # of an acknowledgement: 4.096 us * 2**14 = 67 ms, then it is sent again
_RETRIES = 6  # 7 means without end on some devices
_HOPS = 64
_BIND_S = 0.1  # for a window; an adapter takes some microseconds, so the event loop may wait for it


@dataclass(frozen=True, slots=True, kw_only=True)
class PairContext:
    """What the queue pairs of a device share: READs that one answers and requests at once, and its depth."""

    verbs: Pyverbs
    context: Any
    chosen: PortChoice
    depth: int
    answers: int
    asks: int


class NativeRegistration:
    """A Registration by a memory region of the device."""

    def __init__(self, region: Any, address: int, nbytes: int, iova: int) -> None:
        self.region = region
        self.address = address
        self.nbytes = nbytes
        self.iova = iova
        self.lkey = int(region.lkey)

    def __repr__(self) -> str:
        return f"NativeRegistration({self.nbytes} bytes at {self.address:#x})"

    def close(self) -> None:
        _close(self.region)


class NativeGrant:
    """A ReadGrant by a memory window or region of its own."""

    def __init__(self, owner: Any, memory: RemoteMemory, nbytes: int) -> None:
        self._owner = owner
        self.memory = memory
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"NativeGrant({self.nbytes} bytes at {self.memory.address:#x})"

    def close(self) -> None:
        _close(self._owner)


class _Pair:
    """A queue pair of type RC, with a completion queue of its own; `access` is what its peer may do."""

    def __init__(self, context: PairContext, pd: Any, access: int) -> None:
        self._context = context
        self._verbs = verbs = context.verbs
        self._pd = pd
        self._access = access
        port, qp = context.chosen.port, verbs.qp
        self._cq = verbs.cq.CQ(context.context, context.depth + 1)
        cap = qp.QPCap(max_send_wr=context.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = qp.QPInitAttr(
            qp_type=verbs.enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=1
        )
        self._qp = qp.QP(pd, init)
        attr = qp.QPAttr(port_num=port.number)
        attr.qp_access_flags = access
        attr.pkey_index = 0
        self._qp.to_init(attr)
        self._address = QueuePairAddress(
            number=self._qp.qp_num,
            first_psn=secrets.randbits(24),
            lid=port.lid,
            mtu_bytes=port.mtu_bytes,
            reads=context.answers,
            gid=context.chosen.gid.value,
        )
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address.number}, {'closed' if self._closed else 'open'})"

    @property
    def address(self) -> QueuePairAddress:
        return self._address

    def connect(self, peer: QueuePairAddress) -> None:
        verbs = self._verbs
        enums = verbs.enums
        with refusals(verbs, "cannot connect a queue pair"):
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
            attr.max_rd_atomic = min(self._context.asks, peer.reads)
            mask = enums.IBV_QP_STATE | enums.IBV_QP_SQ_PSN | enums.IBV_QP_TIMEOUT | enums.IBV_QP_RETRY_CNT
            mask |= enums.IBV_QP_RNR_RETRY | enums.IBV_QP_MAX_QP_RD_ATOMIC
            self._qp.modify(attr, mask)

    def close(self) -> None:
        """Destroy the queue pair, or reset it, which stops it as well. Raises DeviceError."""
        if self._closed:
            return
        try:
            _close(self._qp)
        except DeviceError as error:
            enums = self._verbs.enums
            with refusals(self._verbs, f"{error}; and it cannot be reset"):
                self._qp.modify(self._verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RESET), enums.IBV_QP_STATE)
            logger.warning("%r was reset, as it cannot be destroyed: %s", self, error)
        self._closed = True
        close_logged(self._cq)

    def _ready_to_receive(self, peer: QueuePairAddress) -> Any:
        verbs, chosen = self._verbs, self._context.chosen
        gid = verbs.addr.GID(_gid_groups(peer.gid))
        route = verbs.addr.GlobalRoute(dgid=gid, sgid_index=chosen.gid.index, hop_limit=_HOPS)
        attr = verbs.qp.QPAttr(port_num=chosen.port.number)
        attr.qp_access_flags = self._access
        attr.path_mtu = min(peer.mtu_bytes, chosen.port.mtu_bytes).bit_length() - 8  # 256 bytes are 1
        attr.dest_qp_num = peer.number
        attr.rq_psn = peer.first_psn
        attr.max_dest_rd_atomic = self._context.answers
        attr.min_rnr_timer = 12
        attr.ah_attr = verbs.addr.AHAttr(
            port_num=chosen.port.number, is_global=int(chosen.port.is_ethernet), dlid=peer.lid, gr=route
        )
        return attr


class ReadingPair(_Pair):
    """A QueuePair: the peer may do nothing."""

    def __init__(self, context: PairContext, pd: Any) -> None:
        super().__init__(context, pd, 0)
        self._faults = context.verbs.faults

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        verbs = self._verbs
        with refusals(verbs, "cannot post a READ"):
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
        with refusals(self._verbs, "cannot poll for completions"):
            _, ended = self._cq.poll(self._context.depth)
        return [ReadCompletion(int(one.wr_id), self._fault(one)) for one in ended or ()]

    def _fault(self, ended: Any) -> str | None:
        if ended.status == self._verbs.enums.IBV_WC_SUCCESS:
            return None
        return self._faults.get(int(ended.status), f"status {ended.status}")


class NativeServingPair(_Pair):
    """A serving pair in the protection domain `pd` of all registrations; with None, in one of its own."""

    def __init__(self, context: PairContext, pd: Any | None) -> None:
        self.binds = pd is not None
        domain = pd or context.verbs.pd.PD(context.context)
        super().__init__(context, domain, context.verbs.enums.IBV_ACCESS_REMOTE_READ)

    def bind(self, registration: Registration, address: int, nbytes: int) -> NativeGrant:
        assert isinstance(registration, NativeRegistration)
        self._check_open()
        verbs, enums = self._verbs, self._verbs.enums
        start = registration.iova + address - registration.address
        with refusals(verbs, f"cannot make a window of {nbytes} bytes"):
            # A new one each time: the key of a window that is bound again repeats after 256 times.
            window = verbs.mr.MW(self._pd, enums.IBV_MW_TYPE_2)
        try:
            with refusals(verbs, f"cannot bind a window of {nbytes} bytes"):
                info = verbs.mr.MWBindInfo(registration.region, start, nbytes, enums.IBV_ACCESS_REMOTE_READ)
                request = verbs.wr.SendWR(opcode=enums.IBV_WR_BIND_MW, send_flags=enums.IBV_SEND_SIGNALED)
                request.set_bind_wr(window, info)
                self._qp.post_send(request)
                self._wait_bound()
        except BaseException:
            close_logged(window)
            raise
        return NativeGrant(window, RemoteMemory(start, int(request.rkey)), nbytes)

    def register(self, address: int, nbytes: int, *, is_gpu: bool) -> NativeGrant:
        self._check_open()
        verbs, access = self._verbs, int(self._verbs.enums.IBV_ACCESS_REMOTE_READ)
        if is_gpu:
            made = register_gpu(verbs, self._pd, address, nbytes, access)
            return NativeGrant(made.region, RemoteMemory(made.iova, int(made.region.rkey)), nbytes)
        with refusals(verbs, f"cannot register {nbytes} bytes of memory"):
            region = verbs.mr.MR(self._pd, nbytes, access, address=address)
        return NativeGrant(region, RemoteMemory(address, int(region.rkey)), nbytes)

    def close(self) -> None:
        super().close()
        if not self.binds:
            close_logged(self._pd)  # with the registrations in it

    def _check_open(self) -> None:
        if self._closed:  # the binding does not check its protection domain
            raise DeviceError("the queue pair is closed")

    def _wait_bound(self) -> None:
        end_s = time.monotonic() + _BIND_S
        while True:
            _, ended = self._cq.poll(1)
            if ended:
                break
            if time.monotonic() > end_s:
                raise DeviceError(f"a window was not bound in {_BIND_S:g} s")
            os.sched_yield()
        if ended[0].status != self._verbs.enums.IBV_WC_SUCCESS:
            status = int(ended[0].status)
            raise DeviceError(f"a window was not bound: {self._verbs.faults.get(status, status)}")


def register_gpu(verbs: Pyverbs, pd: Any, address: int, nbytes: int, access: int) -> NativeRegistration:
    """Register GPU memory as a dma-buf, else by peermem. Raises DeviceError with what is missing."""
    try:
        with exported(address, nbytes) as (file, offset):
            with refusals(verbs, f"cannot register {nbytes} bytes of a dma-buf"):
                region = verbs.mr.DmaBufMR(pd, nbytes, access, file, offset)
        return NativeRegistration(region, address, nbytes, offset)  # it counts from the offset on
    except DeviceError as refused:
        # Without dma-buf, nvidia_peermem makes device pointers known to the adapters' drivers.
        try:
            with refusals(verbs, f"cannot register {nbytes} bytes of memory"):
                region = verbs.mr.MR(pd, nbytes, access, address=address)
        except DeviceError as error:
            raise DeviceError(f"no GPU memory for RDMA: {refused}; without dma-buf: {error}") from error
        logger.info("GPU memory is registered by peermem, as dma-buf is not to be had: %s", refused)
        return NativeRegistration(region, address, nbytes, address)


def _gid_groups(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))


def close_logged(thing: Any) -> None:
    """Close an object which uses no memory; a device's refusal is logged, and the process continues."""
    try:
        _close(thing)
    except DeviceError as error:
        logger.warning("process %d: %s", os.getpid(), error)


def _close(thing: Any) -> None:
    try:
        thing.close()
    except Exception as error:  # whatever the binding raises
        raise DeviceError(f"closing a {type(thing).__name__} failed: {error}") from error
