"""Bringing an image into host memory by a cast: this node's part in it, checked block by block."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from invoker.counters import Counters
from invoker.errors import InvokerError
from invoker.fetch import Target
from rdmacast.cast import Cast
from rdmacast.cast_limits import STALL_S, pulls_s
from rdmacast.cast_report import CastReport
from rdmacast.cast_spec import CastSpec, Member
from rdmacast.connector import Connector
from rdmacast.errors import CastError
from rdmacast.session_settings import SessionSettings
from rdmacast.transport import PeerAddress
from rdmacast.watching import Watcher
from registry.cast import CastProgress, CastState
from registry.clock import Clock
from registry.errors import RegistryError
from registry.images.manifest import UNIT_BYTES, Manifest, layer_borders
from registry.images.verify import check_units
from registry.messages import CastRef

TELL_S = 0.5  # between two words about a cast under way

log = logging.getLogger("invoker.cast_fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class CastGear:
    """What this node takes part in casts with. `tell` is given each CastProgress to publish."""

    node: str
    connector: Connector
    watcher: Watcher
    counters: Counters
    clock: Clock
    tell: Callable[[CastProgress], None]


def takes_part(ref: CastRef | None, node: str) -> bool:
    """Whether the cast is to bring the image to the node."""
    if ref is None:
        return False
    indexes = [index for index, member in enumerate(ref.members) if member.node == node]
    return bool(indexes) and indexes[0] not in ref.sources


def is_sound(ref: CastRef, nbytes: int) -> bool:
    """Whether a cast of an image of that size can be as `ref` says; its blocks must be whole units."""
    try:
        cast_spec(ref, "", nbytes)
    except (CastError, ValueError):
        return False
    return ref.block_bytes % UNIT_BYTES == 0


def cast_of(ref: CastRef, manifest: Manifest) -> CastSpec:
    """Whose layers come whole early: all nodes have the manifest. Raises ValueError, CastError."""
    borders = layer_borders(manifest, ref.block_bytes)
    return cast_spec(ref, manifest.sha256, manifest.nbytes, borders)


def cast_spec(ref: CastRef, region: str, nbytes: int, borders: tuple[int, ...] = ()) -> CastSpec:
    """Raises ValueError, CastError."""
    return CastSpec(
        cast=ref.cast_id,
        region=region,
        nbytes=nbytes,
        block_bytes=ref.block_bytes,
        members=tuple(
            Member(name=member.node, address=PeerAddress(url=member.address, host=member.host))
            for member in ref.members
        ),
        sources=ref.sources,
        planned=ref.planned,
        edge=ref.edge,
        in_turn=ref.in_turn,
        link_bytes_s=ref.link_bytes_s,
        planner=ref.planner,
        borders=borders,
        epoch=ref.epoch,
    )


async def from_cast(ref: CastRef, target: Target, gear: CastGear, *, stall_s: float = STALL_S) -> CastReport:
    """Fill the target by this node's part in the cast; blocks that are there already are given to others.

    One from which no block comes for `stall_s`, and the time that a block may take, is given up. Raises
    CastError; what came is kept.
    """
    manifest = target.manifest
    if not is_sound(ref, manifest.nbytes):
        raise CastError(f"cast {ref.cast_id} cannot bring image {manifest.sha256[:12]}")
    part = _Part(ref, target, gear, stall_s)
    try:
        return await part.run()
    except (CastError, RegistryError, InvokerError, OSError):
        raise
    except Exception as fault:  # ours; there are other ways to the image
        log.exception("cast %s failed unexpectedly", ref.cast_id)
        raise CastError(f"{type(fault).__name__}: {fault}") from fault
    finally:
        part.close()


def tell_present(ref: CastRef, nbytes: int, gear: CastGear) -> None:
    """Have it published that the image was here when its cast was to bring it."""
    blocks = -(-nbytes // ref.block_bytes)
    gear.tell(
        CastProgress(
            cast_id=ref.cast_id,
            node=gear.node,
            state=CastState.COMPLETE,
            blocks=blocks,
            held=blocks,
            seconds=0.0,
            updated_at=gear.clock.wall_s(),
            epoch=ref.epoch,
        )
    )


class _Part:
    """One node's part in one cast."""

    def __init__(self, ref: CastRef, target: Target, gear: CastGear, stall_s: float) -> None:
        manifest = target.manifest
        self._ref = ref
        self._target = target
        self._gear = gear
        settings = SessionSettings()
        block_s = pulls_s(ref.block_bytes)
        settings = replace(settings, pull_timeout_s=settings.pull_timeout_s + block_s)
        self._stall_s = stall_s + block_s
        self._limit = asyncio.timeout(self._stall_s)
        self._told_s = 0.0
        # What is told later must not seem earlier when somebody sets the clock.
        self._wall_less_monotonic_s = gear.clock.wall_s() - gear.clock.monotonic_s()
        self._spec = cast_of(ref, manifest)
        self._cast = Cast(
            self._spec,
            gear.node,
            target.filling.view,
            connector=gear.connector,
            watcher=gear.watcher,
            check=self._check,
            check_bytes=UNIT_BYTES,
            prepare=target.filling.prepare,
            on_block=self._arrived,
            region=target.region,
            held=[block for block in range(self._spec.blocks) if target.has(*self._spec.extent(block))],
            settings=settings,
        )

    async def run(self) -> CastReport:
        state, error = CastState.CANCELLED, ""
        self._tell(CastState.RUNNING)
        try:
            async with self._limit:
                report = await self._cast.run()
            state = CastState.COMPLETE
        except TimeoutError:
            state, error = CastState.FAILED, f"no block came for {self._stall_s:g} s"
            raise CastError(error) from None
        except Exception as fault:  # only noted; `from_cast` sorts it
            state, error = CastState.FAILED, str(fault) or type(fault).__name__
            raise
        finally:
            self._target.region.cast_ended()
            self._count()
            self._tell(state, error)
        return report

    def close(self) -> None:
        """Let go of the target's memory."""
        del self._cast

    def _check(self, offset: int, view: memoryview) -> Sequence[int]:
        return check_units(self._target.manifest, offset, view)

    def _arrived(self, offset: int, nbytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._gear.counters.cast_recv_bytes += nbytes
        self._limit.reschedule(now_s + self._stall_s)
        self._target.mark(offset, nbytes)
        if now_s - self._told_s >= TELL_S:
            self._tell(CastState.RUNNING)

    def _count(self) -> None:
        for transport, nbytes in self._cast.report.bytes_by_transport.items():
            self._gear.counters.received_by(transport, nbytes)

    def _tell(self, state: CastState, error: str = "") -> None:
        """Have it published how far the cast has come here."""
        self._told_s = asyncio.get_running_loop().time()
        report = self._cast.report
        faults = report.faults
        self._gear.tell(
            CastProgress(
                cast_id=self._ref.cast_id,
                node=self._gear.node,
                state=state,
                blocks=report.blocks,
                held=report.held,
                seconds=report.seconds,
                updated_at=self._wall_less_monotonic_s + self._gear.clock.monotonic_s(),
                epoch=self._ref.epoch,
                received=dict(report.bytes_by_transport),
                span_s=(report.last_block_s or 0.0) - (report.first_block_s or 0.0),
                pulled=dict(report.bytes_by_peer),
                transports={
                    peer: f"{choice.transport}: {choice.reason}" for peer, choice in report.choices.items()
                },
                faults={
                    kind: count
                    for kind, count in (
                        ("damaged", faults.damaged),
                        ("late", faults.late),
                        ("failed", faults.failed),
                        ("replanned", faults.replanned),
                        ("lost", len(faults.lost)),
                        ("slow", len(report.slow)),
                    )
                    if count
                },
                error=error,
            )
        )
