"""Prompts of a pair: those that wait, the one that the source runs, and what becomes of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invoker.engine.contract import NewSequence
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.slices import KvSlice
from invoker.links.framing import LinkLost


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """The outcome of a prefill by the pair: `kv` for the engine, or `moved`.

    Without K and V the engine runs the whole prompt. It `occupies` the source until the first token.
    """

    kv: tuple[KvSlice, ...] = ()
    occupies: bool = False
    moved: bool = False


@dataclass(eq=False, slots=True)
class WaitingPrompt:
    """A sequence that waits or is prefilled by the pair; `tokens` are all but the last."""

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


@dataclass(slots=True)
class PrefillJob:
    """A prompt that the target has run through `layers` layers, with its hidden states.

    `kv` are the target's K and V; empty if it has the same chain.
    """

    prompt: WaitingPrompt
    layers: int
    hidden: torch.Tensor
    kv: memoryview
    done: int = 0  # tokens


def received_slice(job: PrefillJob, own: Sequence[KvSlice]) -> KvSlice:
    """Return the target's K and V as a slice; layers are as large as those here. Raises LinkLost."""
    shape, dtype = own[0].data.shape, own[0].data.dtype
    if len(job.kv) != job.layers * own[0].nbytes:
        raise LinkLost(f"received {len(job.kv)} bytes of K and V for {job.layers} layers")
    data = torch.frombuffer(job.kv, dtype=dtype).view(job.layers, *shape[1:])
    return KvSlice(first=0, last=job.layers, data=data)
