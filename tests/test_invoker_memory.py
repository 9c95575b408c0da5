"""Pages of large mappings, taken before they are needed."""

import mmap
import threading
import time

import pytest

from invoker.memory import populate, populate_gently

SIZE = 48 << 20


@pytest.fixture
def mapping():
    made = mmap.mmap(-1, SIZE)
    if not populate(made, 0, 4096):
        pytest.skip("this kernel cannot populate")
    yield made
    made.close()


def test_pages_are_taken_by_a_thread_that_rests_most_of_the_time(mapping) -> None:
    told: list[int] = []
    used_s, took_s = time.thread_time(), time.monotonic()
    populate_gently(mapping, SIZE, threading.Event(), told.append)
    used_s, took_s = time.thread_time() - used_s, time.monotonic() - took_s
    assert told[-1] == SIZE and told == sorted(told)
    assert took_s > 3 * used_s


def test_it_ends_its_rest_when_it_is_told_to_stop(mapping) -> None:
    stop, told = threading.Event(), []

    def taken(nbytes: int) -> None:
        told.append(nbytes)
        stop.set()

    populate_gently(mapping, SIZE, stop, taken)
    assert len(told) == 1
