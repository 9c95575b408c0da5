"""Prompts of a pair: those that wait, and what becomes of them."""

import asyncio
from dataclasses import dataclass

from invoker.engine.contract import NewSequence
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.entry import LayerEntry
from invoker.engine.kv.slices import KvSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """What the target made of a prompt, for the source's engine, or `moved`.

    It has run the first layers (`entry`), all of them (`kv`), or none.
    """

    entry: LayerEntry | None = None
    kv: tuple[KvSlice, ...] = ()
    moved: bool = False


@dataclass(eq=False, slots=True)
class WaitingPrompt:
    """A sequence that waits in the pair; `tokens` are its prompt and what was generated from it before."""

    name: str
    sequence: NewSequence
    tokens: list[int]
    result: "asyncio.Future[PairPrompt]"
    offered: bool = False

    @property
    def pages(self) -> int:
        return pages_for(len(self.tokens))

    def resolve(self, found: PairPrompt) -> None:
        """Set its result unless it has one; on the event loop."""
        if not self.result.done():
            self.result.set_result(found)
