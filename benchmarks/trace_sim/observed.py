"""What a function's simulated instances were seen to do, as the scaling policy's capacity (pure)."""

from gateway.planning.work import InstanceCapacity

_MEMORY_S = 10.0  # of steps with prompts: older ones count for less


class ObservedCapacity:
    """The prefill rate and decode step times of a function's instances; `slots`, `kv_tokens` are of one."""

    def __init__(self, slots: int, kv_tokens: int) -> None:
        self.slots, self.kv_tokens = slots, kv_tokens
        self._tokens = self._seconds = 0.0
        self._steps: dict[int, tuple[int, float]] = {}  # by the bit length of the number of sequences
        self._capacity: InstanceCapacity | None = None

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Record prompt tokens of steps that took `seconds`."""
        kept = _MEMORY_S / (_MEMORY_S + seconds)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds
        self._capacity = None

    def decoded(self, sequences: int, step_s: float) -> None:
        """Record a step without prompts."""
        self._steps[sequences.bit_length()] = sequences, step_s
        self._capacity = None

    @property
    def capacity(self) -> InstanceCapacity:
        if self._capacity is None:
            rate = self._tokens / self._seconds if self._seconds else 0.0
            steps = tuple(self._steps[size] for size in sorted(self._steps))
            self._capacity = InstanceCapacity(
                prefill_tokens_s=rate, decode_steps=steps, kv_tokens=self.kv_tokens, slots=self.slots
            )
        return self._capacity
