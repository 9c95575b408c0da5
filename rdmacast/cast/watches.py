"""The watches of a node in a cast: one of each peer that matters, until the peer is lost."""

import asyncio
from collections.abc import Callable
from functools import partial

from rdmacast.bitfield import Bitfield
from rdmacast.cast.spec import CastSpec
from rdmacast.cast.watch_link import OnVerdict, RegionWatch, Watcher
from rdmacast.errors import CastError, LinkClosed
from rdmacast.protocol.pull_report import PullReport

OnPeerBitfield = Callable[[int, Bitfield, int], None]  # as of a watch, with the peer first
OnPeerLost = Callable[[int, CastError, int | None], None]  # a peer, the reason, and its latest epoch

_MAX_WATCHES = 4  # of one peer, one after the other


class Watches:
    """The watches of one cast, by the numbers of its members. Their tasks belong to the owner."""

    def __init__(
        self,
        spec: CastSpec,
        watcher: Watcher,
        *,
        on_bitfield: OnPeerBitfield,
        on_verdict: OnVerdict,
        on_lost: OnPeerLost,
    ) -> None:
        self._spec = spec
        self._watcher = watcher
        self._notify_bitfield = on_bitfield
        self._on_verdict = on_verdict
        self._on_lost = on_lost
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, RegionWatch] = {}
        self._requested: dict[int, int] = {}  # the latest HAVE request to each without a reply
        self._epochs: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Watches({sorted(self._open)} of {sorted(self._tasks)} open, asked {self._requested})"

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks.values())

    def is_open(self, peer: int) -> bool:
        """Return whether the peer is watched."""
        return peer in self._open

    def request_have(self, peer: int, number: int) -> None:
        """Request the peer's bitfield. A request survives the connection."""
        self._requested[peer] = number
        if peer in self._open:
            self._open[peer].request_have(number)
        else:
            self._begin(peer)

    def send_report(self, observer: int, report: Callable[[], PullReport]) -> None:
        """Send a report if the detector is watched, since it replies on the watch; else begin to watch it."""
        if observer in self._open:
            self._open[observer].send_report(report())
        else:
            self._begin(observer)

    def _begin(self, peer: int) -> None:
        if peer not in self._tasks:
            self._tasks[peer] = asyncio.create_task(self._watch(peer))

    async def _watch(self, peer: int) -> None:
        """Watch a peer until it is lost."""
        plan = self._spec.plan
        for number in range(_MAX_WATCHES):
            try:
                opening = self._watcher.watch(
                    plan.members[peer].peer,
                    plan.image,
                    plan.block_bytes,
                    partial(self._on_bitfield, peer),
                    self._on_verdict,
                )
                async with opening as watch:
                    self._open[peer] = watch
                    if peer in self._requested:
                        watch.request_have(self._requested[peer])
                    reason = await watch.wait_ended()
            except CastError as error:
                reason = error
                break
            finally:
                self._open.pop(peer, None)
            # A peer that reported and can be reached lives: only the connection broke. A kept connection may
            # have broken unnoticed before the first watch.
            if not isinstance(reason, LinkClosed) or (number and peer not in self._epochs):
                break
        del self._tasks[peer]
        self._on_lost(peer, reason, self._epochs.get(peer))

    def _on_bitfield(self, peer: int, reported: Bitfield, answers: int) -> None:
        self._epochs[peer] = max(reported.epoch, self._epochs.get(peer, -1))
        if answers and self._requested.get(peer) == answers:
            del self._requested[peer]
        self._notify_bitfield(peer, reported, answers)
