"""An estimate of what a request costs at most, before it runs. Pure but for what it learns."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from registry.records.usage import CostParts, PriceRate, cost_parts

_CAPACITY = 1024  # function versions
_PROMPT_SHARE = 32  # prompt tokens that take about as long as a generated one
_UNKNOWN_US = 20_000  # a unit, until a request has shown better
_DECAY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBound:
    """What a request computes at most; `calls` are choices or batches."""

    calls: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def units(self) -> int:
        """The parts that take about the same accelerator time."""
        return self.calls + self.completion_tokens + self.prompt_tokens // _PROMPT_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """What some work costs, by its parts, at one rate. `measured`: from what requests took of late."""

    rate: PriceRate
    gpu_ms: int
    measured: bool
    parts: CostParts


@dataclass(slots=True)
class _Usage:
    gpu_type: str
    unit_us: float


class CostEstimates:
    """The accelerator time of requests by function version: the longest of late."""

    def __init__(self) -> None:
        self._usage: OrderedDict[tuple[str, int], _Usage] = OrderedDict()

    def learn(self, version: tuple[str, int], gpu_type: str, gpu_us: int, work: WorkBound) -> None:
        """Take the usage of a request that has ended into account."""
        unit_us = gpu_us / work.units
        if (usage := self._usage.get(version)) is not None:
            unit_us = max(unit_us, usage.unit_us + _DECAY * (unit_us - usage.unit_us))
        self._usage[version] = _Usage(gpu_type, unit_us)
        self._usage.move_to_end(version)
        if len(self._usage) > _CAPACITY:
            self._usage.popitem(last=False)

    def gpu_type(self, version: tuple[str, int]) -> str | None:
        """Return the device that ran the version's last request, None if none has run."""
        usage = self._usage.get(version)
        return None if usage is None else usage.gpu_type

    def estimate(
        self, version: tuple[str, int], work: WorkBound, rates: Sequence[PriceRate]
    ) -> CostEstimate | None:
        """Return the cost of all of `work` at the dearest of the rates; None without any: free of charge."""
        usage = self._usage.get(version)
        gpu_us = work.units * (_UNKNOWN_US if usage is None else usage.unit_us)
        gpu_ms = -(-int(gpu_us) // 1000)
        return max(
            [
                CostEstimate(
                    rate=rate,
                    gpu_ms=gpu_ms,
                    measured=usage is not None,
                    parts=cost_parts(rate, gpu_ms, work.prompt_tokens, work.completion_tokens),
                )
                for rate in rates
            ],
            key=lambda one: one.parts.total,
            default=None,
        )
