"""The last decision on the number of instances of a function, for people."""

from dataclasses import dataclass

from registry.records.function import ScalingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingInputs:
    """What a decision was made for; 0 for what was not seen or does not apply.

    `in_flight` and `held` are calls on instances and queued ones, `ready` and `starting` count instances.
    `queued_prompt_tokens` were not run yet, `arriving_tokens_s` have lately arrived, `kv_tokens` is the KV
    cache of all calls. `prefill_tokens_s` and `kv_tokens_each` are those of one instance, `max_decodes` the
    sequences that it runs within the target time between tokens. A further instance is expected in `start_s`.
    """

    in_flight: int
    held: int
    ready: int
    starting: int
    queued_prompt_tokens: int = 0
    arriving_tokens_s: float = 0.0
    kv_tokens: int = 0
    prefill_tokens_s: float = 0.0
    kv_tokens_each: int = 0
    max_decodes: int = 0
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """The last decision that changed the desired number of instances of a version, at `at` (Unix seconds)."""

    function: str
    version: int
    policy: ScalingMode
    desired: int
    reason: str
    at: float
    inputs: ScalingInputs
