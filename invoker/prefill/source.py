"""The source of a pair: an instance whose waiting prompts a loading node (the target) prefills in part.

Waiting prompts are offered to the target, which runs their first layers, one layer at a time, as far as it
has loaded them. As the source's engine gets through its prompts, the source takes the oldest ones with the
target's hidden states and K and V; the engine runs their other layers in its steps, beside the sequences that
decode. It samples all tokens, so a lost target costs only its work.

A node that loads alone is both: its source takes all prompts once its instance is ready.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial

from invoker.base.errors import NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.engine.contract import EngineCall, NewSequence, TokenOutput
from invoker.engine.kv.entry import EntryFormat
from invoker.engine.stage_contract import Stage
from invoker.instances.instance import Instance
from invoker.pipeline.driver import moved_output
from invoker.prefill.layers import LoadedLayers
from invoker.prefill.prompts import PairPrompt, WaitingPrompt
from invoker.prefill.source_thread import SourceThread
from registry.records.instance import InstanceState

_HANDOVER_TIMEOUT_S = 5.0  # for prompts in progress when the instance is ready: few layers are left


class PairDriver(SourceThread):
    """The source, whose thread runs from its construction.

    It has PipelineDriver's interface, but moves only requests whose prompts wait; those in the engine stay.
    """

    def __init__(
        self,
        instance: Instance,
        before: socket.socket,
        behind: socket.socket,
        *,
        pages: int,
        longest: int,
        name: str,
        entries: EntryFormat | None = None,
        own: LoadedLayers | None = None,
    ) -> None:
        load = None if instance.runner is None else instance.runner.load
        super().__init__(
            *(before, behind),
            pages=pages,
            longest=longest,
            name=name,
            entries=entries,
            own=own,
            load=load,
        )
        self._instance = instance
        self._prompts: set[WaitingPrompt] = set()  # those that wait for their result
        self._running = 0  # streams
        self._refusal: Exception | None = None  # why new requests are refused
        self._names = 0
        if self._load is not None:
            self._load.watch(self._watch_step)
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "running"
        return f"<PairDriver {state}, {self._running} streams, {self.prefilled_prompts} prompts prefilled>"

    @property
    def streams(self) -> int:
        """Return the number of running streams."""
        return self._running

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """Run a request as EngineRunner.generate does.

        A moved one ends with finish reason MOVED, no token. Raises NodeDraining, PipelineLost, EngineError.
        """
        if self._refusal is not None:
            raise self._refusal
        self._running += 1
        self._names += 1
        name, has_token = str(self._names), False
        try:
            found = await self._prefilled(name, sequence)
            if found.moved:
                yield moved_output(sequence.request_id)
                return
            with self._instance.working():
                async with aclosing(self._engine(sequence, call, found)) as outputs:
                    del found  # frees hidden states, K and V once the engine has run the prompt
                    async for output in outputs:
                        if not has_token and output.token_id is not None:
                            has_token = True
                            self._submit(partial(self._on_first_token, name))
                        yield output
        except NoSuchInstance as error:  # its layers may have run here: it continues, not restarts
            raise PipelineLost(str(error)) from error
        finally:
            self._running -= 1
            if not has_token:
                self._submit(partial(self._on_first_token, name))

    def move(self, request_ids: Iterable[str] = ()) -> None:
        """Move these requests if their prompts wait; if none are named, move all waiting, refuse new ones."""
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = self._refusal or NoSuchPipeline("the pair ends")
        for prompt in tuple(self._prompts):
            if not wanted or prompt.sequence.request_id in wanted:
                prompt.resolve(PairPrompt(moved=True))

    def add_layer(self, stage: Stage) -> None:
        """Add the stage of the next layer of a node that is its own target."""
        assert self._own is not None
        self._submit(partial(self._own.append, stage))

    def set_ready(self) -> None:
        """Record that the instance is ready: the engine runs prompts from now on."""
        self._submit(self._set_ready)

    def abort(self, reason: Exception) -> None:
        """Move waiting requests and end the thread, with `reason` as its failure."""
        self.move()
        self.failure = reason
        self._closing.set()
        self._wire.wake()

    async def aclose(self) -> None:
        """Move waiting requests and end the pair after the current step; the engine keeps its own.

        A node that is its own target first hands them to its engine, if that is ready. Idempotent.
        """
        self._refusal = self._refusal or NoSuchPipeline("the pair ends")
        waiting = [prompt.result for prompt in self._prompts]
        if self._own is not None and self._instance.state is InstanceState.READY and waiting:
            await asyncio.wait(waiting, timeout=_HANDOVER_TIMEOUT_S)
        self.move()
        if self._load is not None:
            self._load.unwatch(self._watch_step)
        await super().aclose()

    def fail(self, reason: Exception) -> None:
        """Refuse new requests with `reason`, after the pair has failed.

        The engine runs the waiting ones; where there is none yet, they end.
        """
        self._refusal = reason
        for prompt in tuple(self._prompts):
            if self._instance.runner is not None:
                prompt.resolve(PairPrompt())
            elif not prompt.result.done():
                prompt.result.set_exception(reason)

    def _watch_step(self) -> None:
        self._submit(self._on_step)

    async def _prefilled(self, name: str, sequence: NewSequence) -> PairPrompt:
        tokens = [*sequence.prompt_ids, *sequence.generated_ids]
        prompt = WaitingPrompt(name, sequence, tokens, asyncio.get_running_loop().create_future())
        self._prompts.add(prompt)
        self._submit(partial(self._add, prompt))
        try:
            return await prompt.result
        finally:
            self._prompts.discard(prompt)
            self._submit(partial(self._drop, name))

    def _engine(
        self, sequence: NewSequence, call: EngineCall, found: PairPrompt
    ) -> AsyncGenerator[TokenOutput, None]:
        """Run a request on the instance's engine. Raises NoSuchInstance."""
        runner = self._instance.runner
        if runner is None:
            raise NoSuchInstance(f"instance {self._instance.id} has ended")
        return runner.generate(sequence, call, found.kv, entry=found.entry)
