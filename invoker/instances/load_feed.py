"""The loads of this node's instances for gateways: at a bounded rate, and at once what matters."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

from invoker.instances.instance import Instance
from registry.clock import Clock
from registry.messages.node import InstanceLoad
from registry.records.instance import InstanceState

INTERVAL_S = 0.25  # between reports while loads change
_MIN_INTERVAL_S = 0.02  # even where a change matters at once
_KV_SHORT = 0.9  # share of the KV cache in use
_RATE_CHANGE = 1.25


class LoadFeed:
    """Wakes the followers of loads; `notify` is cheap and is called after each step of an engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed: asyncio.Future[None] | None = None  # None while nothing waits

    def __repr__(self) -> str:
        return f"<LoadFeed {'followed' if self._changed else 'idle'}>"

    def notify(self) -> None:
        """Wake the followers: an engine has run a step, or an instance has changed its state."""
        if self._changed is not None:
            changed, self._changed = self._changed, None
            changed.set_result(None)

    async def follow(
        self, instances: Callable[[], Iterable[Instance]]
    ) -> AsyncGenerator[tuple[InstanceLoad, ...], None]:
        """Yield the loads now and after each change; ends with its caller."""
        reported: dict[str, InstanceLoad] = {}
        reported_s = -INTERVAL_S
        while True:
            read_s = now_s = self._clock.monotonic_s()
            loads = self._read(instances(), now_s)
            due_s = _MIN_INTERVAL_S if matters_at_once(reported, loads) else INTERVAL_S
            if loads != reported and now_s >= reported_s + due_s:
                reported, reported_s = loads, now_s
                yield tuple(loads.values())
                continue
            timeout_s = reported_s + due_s - now_s if loads != reported else None
            await self._change(timeout_s)
            # An engine may run hundreds of steps a second.
            if (early_s := read_s + _MIN_INTERVAL_S - self._clock.monotonic_s()) > 0:
                await asyncio.sleep(early_s)

    async def _change(self, timeout_s: float | None) -> None:
        """Wait for a change, at most `timeout_s`."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=timeout_s)

    def _read(self, instances: Iterable[Instance], now_s: float) -> dict[str, InstanceLoad]:
        found = {}
        for instance in instances:
            runner = instance.runner
            if runner is None or instance.state is not InstanceState.READY or runner.load is None:
                continue
            reading, (used, total) = runner.load.reading(now_s), runner.kv_tokens
            found[instance.id] = InstanceLoad(
                instance_id=instance.id,
                function=instance.request.function,
                version=instance.request.version,
                queued_prompt_tokens=reading.queued_prompt_tokens,
                running=reading.running,
                waiting=reading.waiting,
                decode_tokens_s=round(reading.decode_tokens_s, 1) if reading.running else 0.0,
                prefill_tokens_s=round(reading.prefill_tokens_s, 1),
                decode_steps=tuple((count, round(seconds, 6)) for count, seconds in reading.decode_steps),
                kv_used_tokens=used,
                kv_tokens=total,
            )
        return found


def matters_at_once(before: Mapping[str, InstanceLoad], now: Mapping[str, InstanceLoad]) -> bool:
    """Return whether a change may need another number of instances, so that it must not wait."""
    if before.keys() != now.keys():
        return True
    for instance_id, load in now.items():
        old = before[instance_id]
        slow, fast = sorted((old.prefill_tokens_s, load.prefill_tokens_s))
        if fast > slow * _RATE_CHANGE or _is_short(old) != _is_short(load):
            return True
    return False


def _is_short(load: InstanceLoad) -> bool:
    return load.kv_used_tokens > _KV_SHORT * load.kv_tokens
