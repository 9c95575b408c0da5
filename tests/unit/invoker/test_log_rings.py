"""The last lines of each function's log."""

import asyncio

from invoker.log_rings import LogRings
from registry.clock import FakeClock


def test_log_rings_are_bounded() -> None:
    rings = LogRings(FakeClock())
    for number in range(300):
        rings.add(f"f{number}", 1, "one\ntwo")
    assert rings.tail("f0", 10) == () and len(rings.tail("f299", 10)) == 2
    for number in range(2000):
        rings.add("f299", 1, f"line {number}")
    lines = rings.tail("f299", 5000)
    assert len(lines) == 1000 and lines[-1].endswith("Z line 1999")
    assert lines[-1].startswith("2023-11-14T22:13:20.000Z")
    assert rings.tail("f299", 0) == ()


async def test_lines_of_a_deleted_function_are_not_those_of_its_successor() -> None:
    rings = LogRings(FakeClock())
    rings.add("chat", 2, "of the first owner")
    rings.add("chat", 3, "of the second")
    assert [line.partition(" ")[2] for line in rings.tail("chat", 10, since=3)] == ["of the second"]
    following = rings.follow("chat", 10, since=3)
    assert len(await anext(following)) == 1
    ahead = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    rings.add("chat", 2, "still draining")
    rings.add("chat", 3, "new")
    assert [line.partition(" ")[2] for line in await ahead] == ["new"]
