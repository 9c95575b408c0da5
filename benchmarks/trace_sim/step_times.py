"""Step times of a profile, by a formula that costs little, and histograms of them (pure)."""

import math
from collections import Counter
from collections.abc import Sequence

from invoker.emulated.profiles import BYTES, Profile

_BINS_A_FACTOR = 40  # of e: the bins are 2.5 % wide


class StepTimes:
    """The same times as `Profile.step_s`, of steps in which `sampled` of the sequences yield a token."""

    def __init__(self, profile: Profile) -> None:
        model, gpu, gpus = profile.model, profile.gpu, profile.gpus
        flops_per_s = gpus * gpu.flops_per_s * gpu.compute
        bytes_per_s = gpus * gpu.memory_bytes_per_s * gpu.memory
        layers = model.layers
        self._token_s = layers * 2 * model.layer_weights / flops_per_s
        self._pair_s = layers * 4 * model.hidden / flops_per_s
        self._weights_s = layers * model.layer_weights * BYTES / bytes_per_s
        self._context_s = layers * model.kv_layer_bytes / bytes_per_s
        self._fixed_s = layers * gpu.kernels_s
        self._exchanged_s = 0.0
        if gpus > 1:
            nbytes = 2 * (gpus - 1) / gpus * model.hidden * BYTES
            self._exchanged_s = layers * 2 * nbytes / gpu.peer_bytes_per_s
            self._fixed_s += layers * 2 * gpu.exchange_s
        self._head_row_s = 2 * model.embedding_weights / flops_per_s
        self._head_s = model.embedding_weights * BYTES / bytes_per_s
        self._kernels_s = gpu.kernels_s

    def step_s(self, tokens: float, sequences: int, context: float, sampled: int) -> float:
        """Return the seconds of a step of `tokens` new tokens after `context` earlier ones in total."""
        pairs = tokens * (context / sequences + (tokens / sequences + 1) / 2)
        computing_s = self._token_s * tokens + self._pair_s * pairs
        reading_s = self._weights_s + self._context_s * (context + tokens)
        taken_s = max(computing_s, reading_s) + self._fixed_s + self._exchanged_s * tokens
        if sampled:
            taken_s += max(self._head_row_s * sampled, self._head_s) + self._kernels_s
        return taken_s


class TimeHistogram:
    """Counts of durations in bins of equal ratio: a percentile is exact to 2.5 %."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float, count: int) -> None:
        self._bins[round(math.log(seconds) * _BINS_A_FACTOR)] += count

    def __len__(self) -> int:
        return self._bins.total()

    def percentile(self, share: float) -> float | None:
        """Return the nearest-rank percentile, or None without values."""
        left = max(1, math.ceil(self._bins.total() * share / 100))
        for place in sorted(self._bins):
            left -= self._bins[place]
            if left <= 0:
                return math.exp(place / _BINS_A_FACTOR)
        return None

    def merge(self, others: Sequence["TimeHistogram"]) -> None:
        for other in others:
            self._bins.update(other._bins)
