"""Stages of single layers, created as a load brings them, for a driver or a target."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from invoker.base.errors import NoSuchInstance, PipelineLost
from invoker.engine.stage_contract import Stage
from invoker.instances.instance import Instance
from invoker.prefill.layers import FAULTS
from invoker.prefill.source import PairDriver
from registry.records.instance import InstanceState

# For the rest of the load: a request that would wait longer should move to a node that is ready sooner.
READY_TIMEOUT_S = 60.0

log = logging.getLogger("invoker.stages")


class LayerStages(Protocol):
    """The part of LayerStageFactory that creates stages."""

    layers: int

    async def make(self, layer: int) -> Stage: ...


async def add_layers(add: Callable[[Stage], None], factory: LayerStages, first: int, last: int) -> None:
    """Create the stages of the layers `[first, last)` as they land. Raises EngineError, NoSuchInstance."""
    for layer in range(first, last):
        add(await factory.make(layer))


async def follow_load(
    driver: PairDriver, instance: Instance, factory: LayerStages, timeout_s: float = READY_TIMEOUT_S
) -> None:
    """Add layers to the driver of a node that loads alone, until its instance is ready.

    After `timeout_s`, or an unexpected error, the driver is aborted and its requests move.
    """
    try:
        async with asyncio.timeout(timeout_s):
            try:
                await add_layers(driver.add_layer, factory, 1, factory.layers)
            except (NoSuchInstance, *FAULTS) as error:  # waiting prompts are left to the engine
                log.info("instance %s: no more layers for layer-wise prefill: %r", instance.id, error)
            await instance.wait_settled()
        if instance.state is InstanceState.READY:
            driver.set_ready()
    except TimeoutError:
        driver.abort(PipelineLost(f"it is not ready after {timeout_s:g} s"))
    except Exception as error:  # a bug: the pipeline ends with it, and its calls go elsewhere
        log.exception("layer-wise prefill failed")
        driver.abort(error.with_traceback(None))
