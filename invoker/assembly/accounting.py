"""The meter, the calls that it charges, and the publisher of both."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from invoker.assembly.setup import NodeSetup
from invoker.base.counters import Counters
from invoker.instances.calls import Calls
from invoker.metering.journal import MeterJournal, discard_recovered, recover_journals
from invoker.metering.meter import GpuMeter
from invoker.publisher import Publisher
from rdmacast.aio.threads import run_in_thread
from registry.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """What a node counts and meters, and what publishes that."""

    counters: Counters
    meter: GpuMeter
    calls: Calls
    publisher: Publisher


async def open_accounting(setup: NodeSetup, gpu_count: int, stack: AsyncExitStack) -> Accounting:
    settings = setup.settings
    meter, journal = await run_in_thread(
        _make_meter, settings.node_id, setup.epoch, setup.journals, setup.clock, gpu_count
    )
    stack.callback(lambda: journal.close(remove=meter.is_settled))
    publisher = Publisher(setup.state, setup.epoch, settings.lease_s, meter)
    meter.on_record(publisher.ledger_changed)
    calls = Calls(meter, setup.clock.monotonic_s)
    return Accounting(counters=Counters(), meter=meter, calls=calls, publisher=publisher)


def _make_meter(
    node: str, epoch: int, folder: Path, clock: Clock, gpu_count: int
) -> tuple[GpuMeter, MeterJournal]:
    """Create the node's meter, with unsent records recovered from the journals of dead nodes."""
    journal, orphans = MeterJournal(folder, node, epoch), recover_journals(folder)
    meter = GpuMeter(
        node,
        epoch,
        now_us=lambda: int(clock.monotonic_s() * 1e6),
        wall_s=clock.wall_s(),
        journal=journal,
        unsent=[record for one in orphans for record in one.records],
        gpu_count=gpu_count,
    )
    discard_recovered(orphans, journal)
    return meter, journal
