"""What the controller tells of live serving: when, for how long, and what it forgets."""

import asyncio

from control_fixture import make_version
from virtual_time_fixture import run_in_virtual_time

from gateway.directory import Directory, VersionKey
from gateway.live_board import TTL_S, LiveBoard
from gateway.live_policy import LiveDecision
from gateway.wakeup import Wakeup
from registry.change import FunctionChanged
from registry.clock import FakeClock
from registry.function import Function
from registry.live import Live, LivePipeline, LiveRecord, LiveStage
from registry.memory_state import MemoryState


class TellingState(MemoryState):
    """Keeps what it was told, and takes it once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.told: list[LiveRecord] = []

    async def put_live(self, record: LiveRecord, ttl_s: float) -> None:
        self.asked.set()
        await self.gate.wait()
        self.told.append(record)
        await super().put_live(record, ttl_s)


def pipeline(id_: str) -> LivePipeline:
    stages = (
        LiveStage(node="a", instance_id=f"{id_}-a", first=0, last=1),
        LiveStage(node="b", instance_id=f"{id_}-b", first=1, last=2),
    )
    return LivePipeline(pipeline_id=id_, epoch=0, stages=stages, head=1, rate=1.5, slots=8)


def decision(reason: str) -> LiveDecision:
    return LiveDecision(way=Live.PIPELINE, reason=reason)


def test_the_end_of_a_deleted_functions_last_pipelines_is_told() -> None:
    async def main() -> None:
        state, key = TellingState(), VersionKey("deleted", 1)
        board = LiveBoard(state, Directory(), Wakeup(), FakeClock(), lambda: 1)
        board.put(key, pipeline("p"))
        board.put(key, pipeline("q"))
        state.gate.clear()
        publishing = asyncio.create_task(board.run())
        await state.asked.wait()
        board.drop(key, "p")
        board.drop(key, "q")
        state.gate.set()
        await asyncio.sleep(TTL_S)
        assert [len(record.pipelines) for record in state.told] == [2, 0]
        assert not publishing.done() and repr(board) == "<LiveBoard []>"
        publishing.cancel()

    run_in_virtual_time(main())


def test_a_pipeline_is_renewed_however_much_others_change() -> None:
    async def main() -> None:
        state, quiet, busy = TellingState(), VersionKey("quiet", 1), VersionKey("busy", 1)
        board = LiveBoard(state, Directory(), Wakeup(), FakeClock(), lambda: 1)
        publishing = asyncio.create_task(board.run())
        board.put(quiet, pipeline("p"))
        for second in range(int(3 * TTL_S)):
            board.decided(busy, decision(f"the {second}th"))
            await asyncio.sleep(1)
        assert sum(record.function == "quiet" for record in state.told) > 2 * 3
        publishing.cancel()

    run_in_virtual_time(main())


def test_decisions_on_versions_that_are_current_no_more_are_forgotten() -> None:
    async def main() -> None:
        directory = Directory()
        function = Function(name="f", current=2, versions=(1, 2), created_at=0.0)
        directory.apply(FunctionChanged(function=function, version=make_version(version=2)), 0.0)
        board = LiveBoard(TellingState(), directory, Wakeup(), FakeClock(), lambda: 1)
        publishing = asyncio.create_task(board.run())
        board.put(VersionKey("f", 1), pipeline("p"))
        board.decided(VersionKey("f", 2), decision("the new one"))
        await asyncio.sleep(TTL_S)
        assert "f:1" in repr(board) and "f:2" in repr(board)  # one serves by pipelines still
        board.drop(VersionKey("f", 1), "p")
        await asyncio.sleep(TTL_S)
        assert repr(board) == "<LiveBoard [('f:2', [])]>"
        publishing.cancel()

    run_in_virtual_time(main())
