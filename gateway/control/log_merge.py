"""The log lines of many nodes as one stream, which goes on over nodes that come and go."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from gateway.cluster.condition import ChangeCondition
from rdmacast.aio.groups import cancel_and_discard
from registry.errors import ChannelError, reason_of
from registry.records.node import NodeRecord

MAX_QUEUED = 1024
MAX_AGAIN = 1000  # lines of a node that came after the start
STAMP = len("2023-11-14T22:13:20.000Z")

ReadLines = Callable[[str, int], AsyncGenerator[str, None]]


async def merge_logs(
    nodes: Callable[[], Iterable[NodeRecord]],
    read: ReadLines,
    changes: ChangeCondition,
    *,
    lines: int,
    follow: bool,
) -> AsyncGenerator[str, None]:
    """Yield the last `lines` lines of each node, each after its node's name; with `follow` also what comes.

    With `follow` nodes that come later are read, too. Of one that was restarted, lines that were yielded
    before are left out, by their times.
    """
    merged: asyncio.Queue[str | None] = asyncio.Queue(maxsize=MAX_QUEUED)
    epochs: dict[str, int] = {}  # of the processes that are read, or were
    shown: dict[str, str] = {}  # node -> the time of its last line

    async def read_node(node: str, count: int) -> None:
        before = shown.get(node, "")
        try:
            async with aclosing(read(node, count)) as found:
                async for line in found:
                    if line[:STAMP] > before:
                        shown[node] = max(shown.get(node, ""), line[:STAMP])
                        await merged.put(f"{node} | {line}")
        except ChannelError as error:
            await merged.put(f"{node} | ({reason_of(error)})")
        await merged.put(None)

    def coming() -> list[NodeRecord]:
        return [node for node in nodes() if epochs.get(node.id, 0) < node.epoch]

    def start(group: set[asyncio.Task[None]], count: int) -> int:
        fresh = coming()
        for node in fresh:
            epochs[node.id] = node.epoch
            task = asyncio.create_task(read_node(node.id, count))
            group.add(task)
            task.add_done_callback(group.discard)
        return len(fresh)

    readers: set[asyncio.Task[None]] = set()

    async def watch() -> None:
        while True:
            await changes.wait_for(lambda: bool(coming()))
            start(readers, MAX_AGAIN)

    reading = start(readers, lines)
    watcher = [asyncio.create_task(watch())] if follow else []
    try:
        while reading or follow:
            line = await merged.get()
            if line is None:
                reading -= 1
            else:
                yield line
    finally:
        await cancel_and_discard(*watcher)
        await cancel_and_discard(*readers)
