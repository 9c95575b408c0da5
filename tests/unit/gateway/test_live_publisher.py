"""What the controller tells of live serving: when, for how long, and what it forgets."""

import asyncio
import itertools

from control_fixture import make_version
from telling_state_fixture import TellingState
from virtual_time_fixture import run_in_virtual_time

from gateway.directory import Directory, VersionKey
from gateway.live_board import LiveBoard
from gateway.live_policy import LiveDecision
from gateway.wakeup import Wakeup
from registry.change import FunctionChanged
from registry.clock import FakeClock
from registry.function import Function
from registry.live import Live, LivePipeline, LiveStage


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
        await state.until(lambda: len(state.told) == 2)
        assert [len(record.pipelines) for record in state.told] == [2, 0]
        board.put(VersionKey("other", 1), pipeline("r"))
        await state.renewed("other")
        assert state.times("deleted") == 2
        assert not publishing.done() and "deleted" not in repr(board)
        publishing.cancel()

    run_in_virtual_time(main())


def test_a_pipeline_is_renewed_however_much_others_change() -> None:
    async def main() -> None:
        state, quiet, busy = TellingState(), VersionKey("quiet", 1), VersionKey("busy", 1)
        board = LiveBoard(state, Directory(), Wakeup(), FakeClock(), lambda: 1)
        publishing = asyncio.create_task(board.run())
        board.put(quiet, pipeline("p"))
        loop, seconds = asyncio.get_running_loop(), itertools.count()

        def change() -> None:  # sooner than what is quiet is renewed
            board.decided(busy, decision(f"the {next(seconds)}th"))
            loop.call_later(1.0, change)

        change()
        for _ in range(3):
            await state.renewed("quiet")
        publishing.cancel()

    run_in_virtual_time(main())


def test_decisions_on_versions_that_are_current_no_more_are_forgotten() -> None:
    async def main() -> None:
        directory = Directory()
        function = Function(name="f", current=2, versions=(1, 2), created_at=0.0)
        directory.apply(FunctionChanged(function=function, version=make_version(version=2)), 0.0)
        state = TellingState()
        board = LiveBoard(state, directory, Wakeup(), FakeClock(), lambda: 1)
        publishing = asyncio.create_task(board.run())
        board.put(VersionKey("f", 1), pipeline("p"))
        board.decided(VersionKey("f", 2), decision("the new one"))
        board.put(VersionKey("other", 1), pipeline("r"))
        await state.renewed("other")
        assert "f:1" in repr(board) and "f:2" in repr(board)  # one serves by pipelines still
        board.drop(VersionKey("f", 1), "p")
        await state.renewed("other")
        assert "f:1" not in repr(board) and "('f:2', [])" in repr(board)
        publishing.cancel()

    run_in_virtual_time(main())
