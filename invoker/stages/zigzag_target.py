"""The target of a pair: runs what it has of a model for prompts that wait at the source (see
zigzag_source.py)."""

import socket
from dataclasses import dataclass
from functools import partial

import torch

from invoker.engine.stage_contract import Stage, rows_as_bytes
from invoker.stages.frames import LinkLost
from invoker.stages.metered import StepCalls
from invoker.stages.stage_thread import WireThread
from invoker.stages.zigzag_frames import Drop, Given, Offer, PairFrame, PairReader, Take, pack
from invoker.stages.zigzag_layers import CHUNK_TOKENS, LayerChain, Part, settle
from registry.zigzag import Batch, Work, ZigZagQueue


@dataclass(slots=True)
class _Running:
    """A layer of a prompt, and what has come of its parts so far."""

    work: Work
    made: list[torch.Tensor]
    done: int = 0  # tokens


class TargetWorker(WireThread[PairFrame]):
    """At work from when it is made. It begins without layers, of which `grow` brings one after the other;
    `layers` are all of the model, and the last one stays with the source, which has the head."""

    def __init__(
        self, layers: int, calls: StepCalls, before: socket.socket, behind: socket.socket, *, name: str
    ) -> None:
        super().__init__(before, behind, PairReader(), name=name)
        self._queue = ZigZagQueue(layers)
        self._chain = LayerChain()
        self._calls = calls
        self._rows: dict[str, torch.Tensor] = {}  # what the next layer takes, of each prompt
        self._running: _Running | None = None
        self._asked = False  # the source waits for a prompt
        self.start()

    def __repr__(self) -> str:
        return f"<TargetWorker {self._queue!r}>"

    # The loop's side.

    def grow(self, stage: Stage) -> None:
        """The next layer has landed. Its stage is used by the worker alone, until that has ended."""
        self._submit(partial(self._take_layer, stage))

    # The thread's side.

    def _take_layer(self, stage: Stage) -> None:
        self._chain.append(stage)
        self._queue.loaded(len(self._chain))

    def _on_frame(self, frame: PairFrame) -> None:
        match frame.said:
            case Offer(name=name, call=call, tokens=tokens):
                if name in self._rows:
                    raise LinkLost(f"prompt {name} is offered twice")
                self._calls.enter(name, call)
                self._rows[name] = torch.frombuffer(frame.data, dtype=torch.int64)
                self._queue.add(Batch(name=name, tokens=tokens))
            case Drop(name=name):
                self._queue.drop(name)
                self._forget(name)
                self._answer()  # it may be what the source waits for
            case Take():
                self._asked = True
                self._answer()
            case _:
                raise LinkLost("the source gives what is the target's to give")

    def _on_idle(self) -> bool:
        if self._wire.is_sending:  # the source waits for it
            return False
        if self._running is None:
            self._on_wake()  # what landed meanwhile counts at once
            work = self._queue.for_target()
            if work is None:
                return False
            self._running = _Running(work, [])
        self._run_part(self._running)
        return True

    def _on_end(self) -> None:
        self._calls.release_all()
        self._rows.clear()

    def _run_part(self, running: _Running) -> None:
        name, layer = running.work.batch.name, running.work.first
        rows = self._rows[name]
        part = Part(
            name=name,
            start=running.done,
            count=min(CHUNK_TOKENS, len(rows) - running.done),
            total=len(rows),
        )

        def run() -> torch.Tensor:
            return settle(self._chain.run(layer, part, rows[part.start : part.start + part.count]))

        running.made.append(self._calls.metered(run, [(name, part.count)]))
        running.done += part.count
        if running.done == len(rows):
            self._rows[name] = torch.cat(running.made) if len(running.made) > 1 else running.made[0]
            self._running = None
            self._queue.ran(running.work)
            self._answer()

    def _answer(self) -> None:
        """Give the first prompt, once no layer of it is being run."""
        if not self._asked:
            return
        work = self._queue.for_source()
        if work is None and len(self._queue):
            return
        self._asked = False
        if work is None:
            self._wire.push(pack(Given(name="", layers=0, hidden_bytes=0, kv_bytes=0)))
            return
        name, layers = work.batch.name, work.first
        hidden = rows_as_bytes(self._rows[name]) if layers else memoryview(b"")
        kv = [rows_as_bytes(one.data) for one in self._chain.slices(name, 0, layers)]
        said = Given(name=name, layers=layers, hidden_bytes=len(hidden), kv_bytes=sum(map(len, kv)))
        self._wire.push(pack(said), hidden, *kv)
        self._forget(name)

    def _forget(self, name: str) -> None:
        if self._running is not None and self._running.work.batch.name == name:
            self._running = None
        self._chain.forget(name)
        self._rows.pop(name, None)
        self._calls.release(name)
