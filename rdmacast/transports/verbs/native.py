"""An RDMA device through pyverbs, which is optional: imported only when a device is opened.

What of this has run, and where, is in docs/OPERATIONS.md ("RDMA and other transports").
"""

import logging
import mmap
import os
import time
from contextlib import closing
from typing import Any

from rdmacast.errors import DeviceError, NoTransport
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.device import Device, LocalMemory
from rdmacast.transports.verbs.memory import address_of
from rdmacast.transports.verbs.native_pairs import (
    NativeRegistration,
    NativeServingPair,
    PairContext,
    ReadingPair,
    close_logged,
    register_gpu,
)
from rdmacast.transports.verbs.ports import Gid, Port, PortChoice, pick
from rdmacast.transports.verbs.pyverbs_modules import Pyverbs, load, refusals

logger = logging.getLogger(__name__)

DEPTH = 32
MAX_READS = 16  # that a queue pair answers at once
_SELF_TEST_S = 1.0
# Gbit/s of a lane by the code of the speed, lanes by the code of the width.
_SPEEDS = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0, 256: 200.0}
_WIDTHS = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}


def open_device(wanted: str | None, address: str | None) -> tuple[Device, PortChoice]:
    """Open the best port (see `ports.pick`). Raises NoTransport, which names what is missing."""
    verbs = load()
    try:
        with refusals(verbs, "no RDMA device"):
            names = [device.name.decode() for device in verbs.device.get_device_list()]
            ports = [port for name in names for port in _ports(verbs, name)]
        chosen = pick(ports, wanted, address)
        return NativeDevice(verbs, chosen), chosen
    except DeviceError as error:
        raise NoTransport(str(error)) from error


def _ports(verbs: Pyverbs, name: str) -> list[Port]:
    context = verbs.device.Context(name=name)
    try:
        count = context.query_device().phys_port_cnt
        return [_port(verbs, context, name, number) for number in range(1, count + 1)]
    finally:
        context.close()


def _port(verbs: Pyverbs, context: Any, name: str, number: int) -> Port:
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
    """A Device over one port.

    With memory windows of type 2B, which one queue pair's peer alone can use, all queue pairs share a
    protection domain and the registrations in it. Without, each serving pair has a domain of its own.
    """

    def __init__(self, verbs: Pyverbs, chosen: PortChoice) -> None:
        self._verbs = verbs
        self._chosen = chosen
        port = chosen.port
        with refusals(verbs, f"cannot open {port.name}"):
            self._context = verbs.device.Context(name=port.device)
            self._pd = verbs.pd.PD(self._context)
            reported = self._context.query_device()
            self._message_bytes = int(self._context.query_port(port.number).max_msg_sz)
        self._depth = min(DEPTH, reported.max_qp_wr - 1)
        self._binds = bool(reported.device_cap_flags & verbs.enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B)
        self._pairs = PairContext(
            verbs=verbs,
            context=self._context,
            chosen=chosen,
            depth=self._depth,
            answers=max(1, min(MAX_READS, reported.max_qp_rd_atom)),
            asks=max(1, min(MAX_READS, reported.max_qp_init_rd_atom)),
        )
        self._binds = self._binds and self._windows_hold()
        logger.info("peers read by %s", "memory windows" if self._binds else "registrations of single ranges")

    def __repr__(self) -> str:
        return f"NativeDevice({self._chosen})"

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def message_bytes(self) -> int:
        return self._message_bytes

    def queue_pair(self) -> ReadingPair:
        with refusals(self._verbs, "cannot make a queue pair"):
            return ReadingPair(self._pairs, self._pd)

    def serving_pair(self) -> NativeServingPair:
        with refusals(self._verbs, "cannot make a queue pair"):
            return NativeServingPair(self._pairs, self._pd if self._binds else None)

    def register(self, address: int, nbytes: int, *, writable: bool) -> NativeRegistration:
        with refusals(self._verbs, f"cannot register {nbytes} bytes of memory"):
            region = self._verbs.mr.MR(self._pd, nbytes, self._access(writable), address=address)
        return NativeRegistration(region, address, nbytes, address)

    def register_gpu(self, address: int, nbytes: int) -> NativeRegistration:
        return register_gpu(self._verbs, self._pd, address, nbytes, self._access(True))

    def close(self) -> None:
        close_logged(self._context)

    def _windows_hold(self) -> bool:
        """Return whether a READ within a window succeeds here, and one beyond its end fails.

        Soft-RoCE compares it with the ends of the registered memory only.
        """
        page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        start = address_of(memoryview(page))
        try:
            registered = self.register(start, len(page), writable=True)
            with closing(registered), closing(NativeServingPair(self._pairs, self._pd)) as served:
                with closing(self.queue_pair()) as reading:
                    reading.connect(served.address)
                    served.connect(reading.address)
                    with closing(served.bind(registered, start, 64)) as grant:
                        return _is_read(reading, registered, grant.memory, 64) and not _is_read(
                            reading, registered, grant.memory, 65
                        )
        except DeviceError as error:
            logger.info("%r: memory windows are of no use: %s", self, error)
            return False

    def _access(self, writable: bool) -> int:
        """Return no access for peers: that is granted for a range, to one of them."""
        enums = self._verbs.enums
        binds = enums.IBV_ACCESS_MW_BIND if self._binds else 0
        return int(enums.IBV_ACCESS_LOCAL_WRITE | binds) if writable else 0


def _is_read(reading: ReadingPair, into: NativeRegistration, remote: RemoteMemory, nbytes: int) -> bool:
    reading.read(0, LocalMemory(into.iova + mmap.PAGESIZE, into.lkey), remote, nbytes)
    end_s = time.monotonic() + _SELF_TEST_S
    while not (ended := reading.poll()):
        if time.monotonic() > end_s:
            raise DeviceError("a READ from this port to itself does not end")
        os.sched_yield()
    return ended[0].fault is None
