"""The target of a pair: runs its loaded layers for prompts that wait at the source (see source.py)."""

import socket
from dataclasses import dataclass
from functools import partial

import torch

from invoker.engine.stage_contract import Stage, rows_as_bytes
from invoker.links.framing import LinkFrame, LinkLost
from invoker.pipeline.metered import StepCalls
from invoker.pipeline.stage_thread import WireThread
from invoker.prefill.frames import (
    PairMessage,
    PromptDrop,
    PromptHandover,
    PromptOffer,
    PromptRequest,
    encode,
    pair_reader,
)
from invoker.prefill.layers import CHUNK_TOKENS, LayerChain, PromptChunk, synchronize
from invoker.prefill.zigzag_queue import LayerWork, PromptBatch, ZigZagQueue


@dataclass(slots=True)
class _RunningLayer:
    """A prompt in a layer, with the output rows of its chunks so far."""

    work: LayerWork
    outputs: list[torch.Tensor]
    done: int = 0  # tokens


class TargetWorker(WireThread[PairMessage]):
    """The target's thread, running from its construction; it starts without layers.

    `layers` is the model's number of layers; the last one always runs on the source, which samples.
    """

    def __init__(
        self, layers: int, calls: StepCalls, before: socket.socket, behind: socket.socket, *, name: str
    ) -> None:
        super().__init__(before, behind, pair_reader(), name=name)
        self._queue = ZigZagQueue(layers)
        self._chain = LayerChain()
        self._calls = calls
        self._rows: dict[str, torch.Tensor] = {}  # each prompt's input to its next layer
        self._running: _RunningLayer | None = None
        self._requested = False  # the source waits for a prompt
        self.start()

    def __repr__(self) -> str:
        return f"<TargetWorker {self._queue!r}>"

    # On the event loop.

    def add_layer(self, stage: Stage) -> None:
        """Add the stage of the next layer, which the worker owns until it has ended."""
        self._submit(partial(self._append_layer, stage))

    # On the thread.

    def _append_layer(self, stage: Stage) -> None:
        self._chain.append(stage)
        self._queue.set_loaded_layers(len(self._chain))

    def _on_frame(self, frame: LinkFrame[PairMessage]) -> None:
        match frame.message:
            case PromptOffer(name=name, call=call, tokens=tokens):
                if name in self._rows:
                    raise LinkLost(f"prompt {name} was offered twice")
                self._calls.enter(name, call)
                self._rows[name] = torch.frombuffer(frame.payload, dtype=torch.int64)
                self._queue.add(PromptBatch(name=name, tokens=tokens))
            case PromptDrop(name=name):
                self._queue.drop(name)
                self._drop(name)
                self._hand_over()  # the source may wait for it
            case PromptRequest():
                self._requested = True
                self._hand_over()
            case _:
                raise LinkLost("unexpected handover from the source")

    def _on_idle(self) -> bool:
        if self._wire.is_sending:  # the source waits for it
            return False
        if self._running is None:
            self._on_wake()  # add layers that landed meanwhile
            work = self._queue.next_for_target()
            if work is None:
                return False
            self._running = _RunningLayer(work, [])
        self._run_chunk(self._running)
        return True

    def _on_end(self) -> None:
        self._calls.release_all()
        self._rows.clear()

    def _run_chunk(self, running: _RunningLayer) -> None:
        name, layer = running.work.batch.name, running.work.first
        rows = self._rows[name]
        chunk = PromptChunk(
            name=name,
            start=running.done,
            count=min(CHUNK_TOKENS, len(rows) - running.done),
            total=len(rows),
        )

        def run() -> torch.Tensor:
            return synchronize(self._chain.run(layer, chunk, rows[chunk.start : chunk.start + chunk.count]))

        running.outputs.append(self._calls.metered(run, [(name, chunk.count)]))
        running.done += chunk.count
        if running.done == len(rows):
            self._rows[name] = torch.cat(running.outputs) if len(running.outputs) > 1 else running.outputs[0]
            self._running = None
            self._queue.complete(running.work)
            self._hand_over()

    def _hand_over(self) -> None:
        """Send the oldest prompt if one is requested and none of its layers is running."""
        if not self._requested:
            return
        work = self._queue.pop_for_source()
        if work is None and len(self._queue):
            return
        self._requested = False
        if work is None:
            self._wire.send(encode(PromptHandover(name="", layers=0, hidden_bytes=0, kv_bytes=0)))
            return
        name, layers = work.batch.name, work.first
        hidden = rows_as_bytes(self._rows[name]) if layers else memoryview(b"")
        kv = [rows_as_bytes(one.data) for one in self._chain.slices(name, 0, layers)]
        message = PromptHandover(
            name=name, layers=layers, hidden_bytes=len(hidden), kv_bytes=sum(map(len, kv))
        )
        self._wire.send(encode(message), hidden, *kv)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if self._running is not None and self._running.work.batch.name == name:
            self._running = None
        self._chain.drop(name)
        self._rows.pop(name, None)
        self._calls.release(name)
