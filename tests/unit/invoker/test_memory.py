"""Pages of large mappings, taken before they are needed."""

import mmap
import threading
import time

import pytest

from invoker.memory.mappings import pause_after, populate, populate_gently, run_gently

SIZE = 48 << 20


@pytest.fixture
def mapping():
    made = mmap.mmap(-1, SIZE)
    if not populate(made, 0, 4096):
        pytest.skip("this kernel cannot populate")
    yield made
    made.close()


def test_pages_are_taken_by_a_thread_that_rests_most_of_the_time(mapping) -> None:
    used_s, took_s = time.thread_time(), time.monotonic()
    populate_gently(mapping, SIZE, threading.Event())
    used_s, took_s = time.thread_time() - used_s, time.monotonic() - took_s
    assert took_s > 3 * used_s
    again_s = time.thread_time()
    assert populate(mapping, 0, SIZE)
    assert time.thread_time() - again_s < used_s / 3, "the pages were there"


def test_it_ends_its_rest_when_it_is_told_to_stop() -> None:
    stop, taken = threading.Event(), []

    def take(offset: int) -> int:
        taken.append(offset)
        stop.set()
        return 4096

    run_gently(take, SIZE, stop)
    assert taken == [0]


def test_it_ends_where_no_more_can_be_taken() -> None:
    taken = []

    def take(offset: int) -> int:
        taken.append(offset)
        return 5 if offset < 10 else 0

    run_gently(take, SIZE, threading.Event())
    assert taken == [0, 5, 10]


def test_background_work_gives_way_to_what_else_the_process_does() -> None:
    idle, busy = pause_after(0.001, 0.0), pause_after(0.001, 0.3)
    assert idle == pytest.approx(0.004)
    assert busy >= 20 * idle


def test_memory_is_taken_to_its_end_beside_other_work() -> None:
    stop, taken = threading.Event(), []

    def take(offset: int) -> int:
        taken.append(offset)
        return 10

    taking = threading.Thread(target=run_gently, args=(take, 40, stop))
    taking.start()
    while taking.is_alive():
        sum(range(1000))
    assert taken == [0, 10, 20, 30]
