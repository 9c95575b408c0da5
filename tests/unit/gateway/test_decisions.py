"""The publication of decisions: of current versions, and until it succeeds."""

import asyncio

from gateway.cluster.state_cache import VersionKey
from gateway.control.decisions import DecisionPublisher
from gateway.planning.plan import DecidedLoad, Plan
from gateway.planning.policy import FunctionLoad, ScalingDecision
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.records.function import Function, Scaling
from registry.records.scaling import ScalingRecord

OLD, NEW = VersionKey("f", 1), VersionKey("f", 2)
FUNCTIONS = {"f": Function(name="f", current=2, versions=(1, 2))}


def plan_of(**desired: int) -> Plan:
    """Return a plan for the versions `old` and `new`."""
    plan, load = Plan(), FunctionLoad(in_flight=0, held=0, ready=0, starting=0, nodes=1, scaling=Scaling())
    for name, count in desired.items():
        key = NEW if name == "new" else OLD
        plan.desired[key] = count
        plan.decisions[key] = DecidedLoad(decision=ScalingDecision(desired=count, reason=name), load=load)
    return plan


class FailingState(MemoryState):
    """A state that refuses the first decisions."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.published = asyncio.Event()

    async def put_scaling_record(self, record: ScalingRecord) -> None:
        if self.failures:
            self.failures -= 1
            raise StateUnavailable("away")
        await super().put_scaling_record(record)
        self.published.set()


async def shown(publisher: DecisionPublisher, state: FailingState) -> ScalingRecord:
    task = asyncio.create_task(publisher.run())
    async with asyncio.timeout(10):
        await state.published.wait()
    task.cancel()
    await asyncio.wait([task])
    record = await state.scaling_record("f")
    assert record is not None
    return record


async def test_the_version_that_is_replaced_does_not_hide_the_current_one() -> None:
    state = FailingState(0)
    publisher = DecisionPublisher(state)
    publisher.note(plan_of(new=3, old=0), FUNCTIONS, 1.0)
    record = await shown(publisher, state)
    assert (record.version, record.desired) == (2, 3)


async def test_a_decision_that_was_not_published_is_published_later() -> None:
    state = FailingState(2)
    publisher = DecisionPublisher(state, retry_s=0.001)
    publisher.note(plan_of(new=3), FUNCTIONS, 1.0)
    assert (await shown(publisher, state)).desired == 3


async def test_without_the_lease_nothing_more_is_published() -> None:
    state = FailingState(0)
    publisher = DecisionPublisher(state)
    publisher.note(plan_of(new=3), FUNCTIONS, 1.0)
    publisher.stand_down()
    publisher.note(plan_of(new=4), FUNCTIONS, 2.0)
    assert (await shown(publisher, state)).desired == 4
