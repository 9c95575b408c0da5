"""This node's part in a cast that brings an image into host memory or the arena, verified by block.

A pull from other nodes is a cast with this node as its only target.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from invoker.base.counters import Counters
from invoker.base.errors import InvokerError
from invoker.loading.partial_image import PartialImage
from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.limits import STALL_S, silence_s, window_s
from rdmacast.cast.links import CastLinks
from rdmacast.cast.pull import pull_settings, pull_spec
from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.report import CastReport
from rdmacast.cast.runner import Cast
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.cast.spec import CastSpec
from rdmacast.errors import CastError
from registry.clock import Clock
from registry.errors import RegistryError
from registry.images.manifest import UNIT_BYTES, Manifest, block_bytes, layer_borders, min_blocks
from registry.images.verify import check_units
from registry.records.cast import CastProgress, CastState

PROGRESS_INTERVAL_S = 0.5  # between two progress reports

log = logging.getLogger("invoker.cast_fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class CastContext:
    """Dependencies of casts. `publish` receives each CastProgress."""

    node: str
    links: CastLinks
    counters: Counters
    clock: Clock
    publish: Callable[[CastProgress], None]


def spec_of(plan: CastPlan, manifest: Manifest) -> CastSpec:
    """Return the cast with blocks ordered by layer. Raises CastError if it does not match the image."""
    matches = (plan.image, plan.nbytes) == (manifest.sha256, manifest.nbytes)
    if not matches or plan.block_bytes % UNIT_BYTES:
        raise CastError(f"cast {plan.cast_id} does not match image {manifest.sha256[:12]}")
    try:
        return CastSpec(plan=plan, borders=layer_borders(manifest, plan.block_bytes))
    except ValueError as error:
        raise CastError(f"cast {plan.cast_id} cannot run: {error}") from error


async def from_cast(plan: CastPlan, target: PartialImage, context: CastContext) -> CastReport:
    """Fill the target by taking part in the cast; blocks that it has already are served to others.

    Raises CastError, also if no block arrives for `silence_s`; the blocks received are kept.
    """
    limit_s = silence_s(plan.block_bytes)
    spec, settings = spec_of(plan, target.manifest), SessionSettings(pull_timeout_s=limit_s)
    return await _run(_CastFetch(spec, target, context, settings, limit_s))


async def from_peers(
    holders: Sequence[CastMember], target: PartialImage, context: CastContext, *, stall_s: float = STALL_S
) -> CastReport:
    """Pull the image from the first holder that serves it, continuing with the next on failure.

    A holder is left once a block takes longer than `stall_s` and what a window of blocks may take. Raises
    CastError; the blocks received are kept.
    """
    manifest = target.manifest
    size = block_bytes(manifest.nbytes, min_blocks(manifest.nbytes))
    limit_s = stall_s + window_s(size)
    spec = pull_spec(manifest.sha256, manifest.nbytes, size, holders)
    part = _CastFetch(spec, target, context, pull_settings(limit_s), limit_s * (len(holders) + 1))
    return await _run(part)


async def _run(part: "_CastFetch") -> CastReport:
    try:
        return await part.run()
    except (CastError, RegistryError, InvokerError, OSError):
        raise
    except Exception as fault:  # a bug; other sources may still have the image
        log.exception("%r failed unexpectedly", part)
        raise CastError(f"{type(fault).__name__}: {fault}") from fault
    finally:
        part.close()


def report_present(plan: CastPlan, context: CastContext) -> None:
    """Publish that the image was already here when its cast started."""
    context.publish(
        CastProgress(
            cast_id=plan.cast_id,
            node=context.node,
            state=CastState.COMPLETE,
            blocks=plan.blocks,
            held=plan.blocks,
            seconds=0.0,
            updated_at=context.clock.wall_s(),
            epoch=plan.epoch,
        )
    )


class _CastFetch:
    """This node's part in one cast."""

    def __init__(
        self,
        spec: CastSpec,
        target: PartialImage,
        context: CastContext,
        settings: SessionSettings,
        limit_s: float,
    ) -> None:
        self._plan = spec.plan
        self._is_pull = spec.is_pull
        self._target = target
        self._context = context
        self._limit_s = limit_s
        self._limit = asyncio.timeout(limit_s)
        self._reported_s = 0.0
        # Reports must stay in order when the wall clock is set back.
        self._wall_less_monotonic_s = context.clock.wall_s() - context.clock.monotonic_s()
        self._cast = Cast(
            spec,
            "" if spec.is_pull else context.node,
            target,
            links=context.links,
            hooks=BlockHooks(
                check=self._check,
                check_bytes=UNIT_BYTES,
                prepare=target.writer.prepare,
                on_block=self._on_block,
            ),
            region=None if spec.is_pull else target,  # other nodes expect all of it from a pull
            held=[block for block in range(spec.blocks) if target.has(*spec.extent(block))],
            settings=settings,
        )

    def __repr__(self) -> str:
        return repr(self._cast)

    async def run(self) -> CastReport:
        state, error = CastState.CANCELLED, ""
        self._publish(CastState.RUNNING)
        try:
            async with self._limit:
                report = await self._cast.run()
            state = CastState.COMPLETE
        except TimeoutError:
            state, error = CastState.FAILED, f"no block arrived for {self._limit_s:g} s"
            raise CastError(error) from None
        except Exception as fault:  # reported; `from_cast` translates it
            state, error = CastState.FAILED, str(fault) or type(fault).__name__
            raise
        finally:
            self._target.cast_ended()
            self._count_transports()
            self._publish(state, error)
        return report

    def close(self) -> None:
        """Release the target's memory."""
        del self._cast

    def _check(self, offset: int, view: memoryview) -> Sequence[int]:
        return check_units(self._target.manifest, offset, view)

    def _on_block(self, offset: int, nbytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._context.counters.cast_recv_bytes += self._target.wanted(offset, nbytes)[1]
        if self._is_pull:
            self._target.mark(offset, nbytes)
        self._limit.reschedule(now_s + self._limit_s)
        if now_s - self._reported_s >= PROGRESS_INTERVAL_S:
            self._publish(CastState.RUNNING)

    def _count_transports(self) -> None:
        for transport, nbytes in self._cast.report.bytes_by_transport.items():
            self._context.counters.add_received(transport, nbytes)

    def _publish(self, state: CastState, error: str = "") -> None:
        """Publish the progress of the cast on this node, unless it is a pull."""
        if self._is_pull:
            return
        self._reported_s = asyncio.get_running_loop().time()
        report = self._cast.report
        faults = report.faults
        self._context.publish(
            CastProgress(
                cast_id=self._plan.cast_id,
                node=self._context.node,
                state=state,
                blocks=report.blocks,
                held=report.held,
                seconds=report.seconds,
                updated_at=self._wall_less_monotonic_s + self._context.clock.monotonic_s(),
                epoch=self._plan.epoch,
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
