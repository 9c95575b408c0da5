"""Items without a user: how many and how long they are kept."""

from rdmacast.aio.idle_set import IdleSet
from tests.fixtures.patience import PATIENCE_S, until


async def test_the_oldest_of_too_many_items_expires() -> None:
    expired: list[str] = []
    idle = IdleSet(2, PATIENCE_S, expired.append)
    for item in "abacd":  # the first one became the newest again
        idle.add(item)
    assert (expired, list(idle)) == (["b", "a"], ["c", "d"])
    idle.expire_all()
    assert (expired, len(idle)) == (["b", "a", "c", "d"], 0)


async def test_an_item_expires_after_a_while_unless_it_was_discarded() -> None:
    expired: list[str] = []
    idle = IdleSet(2, 0.0, expired.append)
    idle.add("used")
    idle.discard("used")
    idle.discard("unknown")
    idle.add("unused")
    await until(lambda: not len(idle))
    assert expired == ["unused"]


async def test_a_set_of_no_items_keeps_none() -> None:
    expired: list[str] = []
    idle = IdleSet(0, PATIENCE_S, expired.append)
    idle.add("a")
    assert (expired, len(idle)) == (["a"], 0)
