"""What a node of a cast hears of its peers: a watch of each one that matters, until that one is lost."""

import asyncio
from collections.abc import Callable
from functools import partial

from rdmacast.cast_spec import CastSpec
from rdmacast.errors import CastError, LinkClosed
from rdmacast.have_map import HaveMap
from rdmacast.pull_report import PullReport
from rdmacast.watching import Steered, Watch, Watcher

Heard = Callable[[int, HaveMap, int], None]  # as of a Watch, with the peer before
Lost = Callable[[int, CastError, int | None], None]  # a peer, why, and the epoch that it told last

_MOST_WATCHES = 4  # of one peer, one after the other


class Watches:
    """Of one cast, by the numbers of its members. Their tasks belong to who made this."""

    def __init__(
        self, spec: CastSpec, watcher: Watcher, *, heard: Heard, steered: Steered, lost: Lost
    ) -> None:
        self._spec = spec
        self._watcher = watcher
        self._told = heard
        self._steered = steered
        self._lost = lost
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, Watch] = {}
        self._asked: dict[int, int] = {}  # the latest question to each, if it has no answer
        self._epochs: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Watches({sorted(self._open)} of {sorted(self._tasks)} open, asked {self._asked})"

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks.values())

    def ask(self, peer: int, number: int) -> None:
        """Have the peer say what it holds. A question survives the connection."""
        self._asked[peer] = number
        if peer in self._open:
            self._open[peer].ask(number)
        else:
            self._begin(peer)

    def tell(self, observer: int, report: Callable[[], PullReport]) -> None:
        """Only once it is watched, for its answer; until then nothing is told."""
        if observer in self._open:
            self._open[observer].tell(report())
        else:
            self._begin(observer)

    def _begin(self, peer: int) -> None:
        if peer not in self._tasks:
            self._tasks[peer] = asyncio.create_task(self._watch(peer))

    async def _watch(self, peer: int) -> None:
        """Hear what a peer holds, until it is lost."""
        address, spec = self._spec.members[peer].address, self._spec
        for _ in range(_MOST_WATCHES):
            try:
                opening = self._watcher.watch(
                    address, spec.region, spec.block_bytes, partial(self._heard, peer), self._steered
                )
                async with opening as watch:
                    self._open[peer] = watch
                    if peer in self._asked:
                        watch.ask(self._asked[peer])
                    reason = await watch.ended()
            except CastError as error:
                reason = error
                break
            finally:
                self._open.pop(peer, None)
            # A peer that spoke and is still reached lives: only the connection broke.
            if not isinstance(reason, LinkClosed) or peer not in self._epochs:
                break
        del self._tasks[peer]
        self._lost(peer, reason, self._epochs.get(peer))

    def _heard(self, peer: int, told: HaveMap, answers: int) -> None:
        self._epochs[peer] = max(told.epoch, self._epochs.get(peer, -1))
        if answers and self._asked.get(peer) == answers:
            del self._asked[peer]
        self._told(peer, told, answers)
