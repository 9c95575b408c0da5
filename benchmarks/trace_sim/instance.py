"""A simulated instance: continuous batching in closed form between changes of the batch (pure).

The state is exact at `at_s`, the end of a step. A phase is a run of equal steps from there: each decoding
sequence takes one token, and a part of the first prompt is run beside them. It ends when a prompt is complete
or a sequence ends; only then, and when a call comes, is anything computed. Steps follow the native scheduler
for one tenant (`invoker/engine/scheduling/scheduler.py`); there is no preemption, as calls are admitted only
where their KV cache fits.
"""

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from benchmarks.trace_sim.observed import ObservedCapacity
from benchmarks.trace_sim.step_times import StepTimes
from invoker.emulated.profiles import Profile
from invoker.engine.scheduling.scheduler import PREFILL_TOKENS


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """A request.

    `assigned_s`, `first_s` and `end_s` are when it went to an instance, and when its first and last token
    came; -1 before. `left` are the tokens of its prompt that were not run; `kv_tokens` is its KV cache with
    the expected output, as admission counts it.
    """

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    left: int = 0
    kv_tokens: int = 0
    assigned_s: float = -1.0
    first_s: float = -1.0
    end_s: float = -1.0


@dataclass(slots=True)
class PhaseEnd:
    """The calls that got their first token at the end of a phase, and those that ended."""

    first: list[SimulatedCall]
    ended: list[SimulatedCall]


class EngineModel:
    """What all instances share: step times, and the prompt tokens of a step beside others."""

    def __init__(self, profile: Profile) -> None:
        self.times = StepTimes(profile)
        self.shared_tokens = min(profile.free_tokens, PREFILL_TOKENS)


class SimulatedInstance:
    """The engine of one instance; its owner calls `finish_phase` at each `phase_ends_s`.

    `calls`, `fresh` (those without a first token), `fresh_tokens` and `kv_tokens` count what it runs.
    """

    __slots__ = (
        "_adopted",
        "_chunk",
        "_context",
        "_ends",
        "_model",
        "_observed",
        "_order",
        "_packed",
        "_prompts",
        "_step_count",
        "_step_s",
        "_steps",
        "_waiting",
        "at_s",
        "busy_s",
        "calls",
        "fresh",
        "fresh_tokens",
        "id",
        "kv_tokens",
        "moving",
        "node",
        "phase_ends_s",
        "ready_s",
        "started_s",
        "stopping",
    )

    def __init__(self, id_: int, node: int, model: EngineModel, observed: ObservedCapacity) -> None:
        self.id, self.node = id_, node
        self.started_s = self.ready_s = self.busy_s = 0.0
        self.stopping = False
        self.moving = False  # a call is to leave it
        self.calls = self.fresh = self.fresh_tokens = self.kv_tokens = 0
        self.at_s, self.phase_ends_s = 0.0, math.inf
        self._model, self._observed = model, observed
        self._ends: list[tuple[int, int, SimulatedCall]] = []  # by the step that makes their last token
        self._prompts: deque[SimulatedCall] = deque()
        self._waiting: list[SimulatedCall] = []  # prompts for the next phase
        self._adopted: list[tuple[SimulatedCall, int]] = []  # calls that decode in the next phase
        self._order = self._step_count = self._context = 0
        # The phase: its steps, their mean time, the tokens of the first prompt in each, and in its only step
        # the prompts' parts if one is completed.
        self._steps, self._step_s, self._chunk = 0, 0.0, 0
        self._packed: list[tuple[SimulatedCall, int]] = []

    def __repr__(self) -> str:
        return f"<SimulatedInstance {self.id} on {self.node}, {self.calls} calls, {self.fresh} fresh>"

    def add(self, call: SimulatedCall, now_s: float) -> None:
        """Queue a call; its prompt begins after the current step."""
        self.calls += 1
        self.fresh += 1
        self.fresh_tokens += call.prompt_tokens
        self.kv_tokens += call.kv_tokens
        call.left = call.prompt_tokens
        if not self._cut(now_s):
            self._waiting.append(call)
            return
        self._prompts.append(call)
        self._begin()

    @property
    def oldest(self) -> SimulatedCall | None:
        """The call that has decoded for longest, None if none does."""
        return min(self._ends, key=lambda one: one[1])[2] if self._ends else None

    def leave(self, now_s: float) -> tuple[SimulatedCall, int] | None:
        """Remove the oldest call that decodes, after the current step; return it and its tokens left.

        None if none decodes, or that step is the last of its phase.
        """
        if not self._ends or not self._cut(now_s):
            return None
        entry = min(self._ends, key=lambda one: one[1])
        self._ends.remove(entry)
        heapify(self._ends)
        end, _, call = entry
        left = end - self._step_count
        self._context -= call.prompt_tokens + call.output_tokens - 1 - left
        self.calls -= 1
        self.kv_tokens -= call.kv_tokens
        self._begin()
        return call, left

    def adopt(self, call: SimulatedCall, left: int, now_s: float) -> None:
        """Decode the tokens that a call has left, after the current step."""
        self.calls += 1
        self.kv_tokens += call.kv_tokens
        if not self._cut(now_s):
            self._adopted.append((call, left))
            return
        self._decode(call, left)
        self._begin()

    def finish_phase(self) -> PhaseEnd:
        """End the phase at its time and begin the next one."""
        first = self._run_packed() if self._packed else []
        if not first:
            self._run(self._steps)
        ended = []
        for call in first:
            call.first_s = self.at_s
            self.fresh -= 1
            self.fresh_tokens -= call.prompt_tokens
            if call.output_tokens > 1:
                self._decode(call, call.output_tokens - 1)
            else:
                ended.append(call)
        while self._ends and self._ends[0][0] <= self._step_count:
            call = heappop(self._ends)[2]
            self._context -= call.prompt_tokens + call.output_tokens - 1
            ended.append(call)
        for call in ended:
            call.end_s = self.at_s
            self.calls -= 1
            self.kv_tokens -= call.kv_tokens
        self._prompts.extend(self._waiting)
        self._waiting.clear()
        for call, left in self._adopted:
            self._decode(call, left)
        self._adopted.clear()
        self._begin()
        return PhaseEnd(first, ended)

    def check_integrity(self) -> None:
        """Assert that counts and queues agree."""
        assert self.fresh == len(self._prompts) + len(self._waiting)
        assert self.calls == self.fresh + len(self._ends) + len(self._adopted)
        assert (self.phase_ends_s == math.inf) == (self.calls == 0)
        decoded = sum(
            c.prompt_tokens + c.output_tokens - 1 - (end - self._step_count) for end, _, c in self._ends
        )
        assert self._context == decoded

    # --- phases

    def _cut(self, now_s: float) -> bool:
        """End the phase with its current step; return False if that is its last one, which ends by itself."""
        if not self._steps:
            self.at_s = max(self.at_s, now_s)
        elif now_s > self.at_s:
            steps = math.ceil((now_s - self.at_s) / self._step_s)
            if steps >= self._steps:
                return False
            self._run(steps)
        return True

    def _decode(self, call: SimulatedCall, left: int) -> None:
        """Add a call that has so many tokens left to the next phase."""
        self._order += 1
        self._context += call.prompt_tokens + call.output_tokens - 1 - left
        heappush(self._ends, (self._step_count + left, self._order, call))

    def _begin(self) -> None:
        """Begin the next phase at `at_s`."""
        decoding = len(self._ends)
        self._packed.clear()
        until_end = self._ends[0][0] - self._step_count if decoding else 1 << 30
        if self._prompts:
            # More where nothing decodes and one prompt is alone.
            self._chunk = PREFILL_TOKENS if self.calls == 1 else self._model.shared_tokens
            left = self._prompts[0].left
            if left > self._chunk:
                self._steps = min(until_end, (left - 1) // self._chunk)
            else:
                self._pack()
        else:
            self._chunk, self._steps = 0, until_end if decoding else 0
        if not self._steps:
            self.phase_ends_s = math.inf
            return
        self._step_s = self._mean_step_s(self._steps)
        self.phase_ends_s = self.at_s + self._steps * self._step_s

    def _pack(self) -> None:
        """Plan the step that completes the first prompt; those behind it take the rest."""
        self._steps, room = 1, self._chunk
        for call in self._prompts:
            count = min(room, call.left)
            self._packed.append((call, count))
            room -= count
            if not room:
                break

    def _mean_step_s(self, steps: int) -> float:
        """Return the mean time of so many steps of the phase from here."""
        decoding = len(self._ends)
        context = self._context + decoding * (steps - 1) / 2
        tokens, sequences, sampled = decoding, decoding, decoding
        if self._packed:
            sequences += len(self._packed)
            for call, count in self._packed:
                tokens += count
                context += call.prompt_tokens - call.left
                sampled += count == call.left
        elif self._chunk:
            call = self._prompts[0]
            tokens, sequences = tokens + self._chunk, sequences + 1
            context += call.prompt_tokens - call.left + self._chunk * (steps - 1) / 2
        return self._model.times.step_s(tokens, sequences, context, sampled)

    def _run(self, steps: int) -> None:
        """Run some steps of the phase, none of which completes a prompt."""
        decoding = len(self._ends)
        step_s = self._step_s if steps == self._steps else self._mean_step_s(steps)
        if self._chunk:
            self._prompts[0].left -= steps * self._chunk
            self._observed.prefilled(steps * self._chunk, steps * step_s)
        else:
            self._observed.decoded(decoding, step_s)
        self._passed(steps, step_s, decoding)

    def _run_packed(self) -> list[SimulatedCall]:
        """Run the step that completes prompts, and return these."""
        completed = []
        for call, count in self._packed:
            call.left -= count
            if not call.left:
                completed.append(self._prompts.popleft())
        self._observed.prefilled(sum(count for _, count in self._packed), self._step_s)
        self._passed(1, self._step_s, len(self._ends))
        return completed

    def _passed(self, steps: int, step_s: float, decoding: int) -> None:
        self.at_s += steps * step_s
        self.busy_s += steps * step_s
        self._step_count += steps
        self._context += steps * decoding
