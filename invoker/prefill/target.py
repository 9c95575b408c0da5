"""The target of a pair on a node of its own: runs its layers for prompts of the source (see source.py)."""

import socket
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
from invoker.prefill.layers import LoadedLayers


class TargetWorker(WireThread[PairMessage]):
    """The target's thread, running from its construction; it starts without layers.

    `layers` is the model's number of layers; the last one always runs on the source, which samples.
    """

    def __init__(
        self, layers: int, calls: StepCalls, before: socket.socket, behind: socket.socket, *, name: str
    ) -> None:
        super().__init__(before, behind, pair_reader(), name=name)
        self._loaded = LoadedLayers(layers, calls)
        self._requested = False  # the source waits for a prompt
        self.start()

    def __repr__(self) -> str:
        return f"<TargetWorker {self._loaded!r}>"

    # On the event loop.

    def add_layer(self, stage: Stage) -> None:
        """Add the stage of the next layer, which the worker owns until it has ended."""
        self._submit(partial(self._loaded.append, stage))

    # On the thread.

    def _on_frame(self, frame: LinkFrame[PairMessage]) -> None:
        match frame.message:
            case PromptOffer(name=name, call=call, trace=trace):
                try:
                    ids = torch.frombuffer(frame.payload, dtype=torch.int64)
                    self._loaded.add(name, call, ids, trace)
                except ValueError as error:
                    raise LinkLost(f"a prompt was offered twice: {error}") from error
            case PromptDrop(name=name):
                self._loaded.drop(name)
            case PromptRequest():
                self._requested = True
            case _:
                raise LinkLost("unexpected handover from the source")
        self._hand_over()

    def _on_idle(self) -> bool:
        if self._wire.is_sending:  # the source waits for it
            return False
        self._on_wake()  # add layers that landed meanwhile
        ran = self._loaded.run_chunk()
        self._hand_over()
        return ran

    def _on_end(self) -> None:
        self._loaded.chain.release_calls()

    def _hand_over(self) -> None:
        """Send the oldest prompt if one is requested and none of its layers is running."""
        if not self._requested:
            return
        taken = self._loaded.take()
        if taken is None and len(self._loaded):
            return
        self._requested = False
        if taken is None:
            self._wire.send(encode(PromptHandover(name="", layers=0, hidden_bytes=0, kv_bytes=0)))
            return
        name, layers, chain = taken.name, taken.layers, self._loaded.chain
        hidden = rows_as_bytes(taken.rows) if layers else memoryview(b"")
        kv = [rows_as_bytes(one.data) for one in chain.slices(name, layers)]
        message = PromptHandover(
            name=name, layers=layers, hidden_bytes=len(hidden), kv_bytes=sum(map(len, kv))
        )
        self._wire.send(encode(message), hidden, *kv)
        chain.drop(name)
