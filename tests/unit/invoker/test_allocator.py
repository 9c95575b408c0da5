from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.memory.allocator import Allocator
from registry.images.manifest import ALIGNMENT

CAPACITY = 64 * ALIGNMENT
STEPS = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 20 * ALIGNMENT)), max_size=60)


@given(STEPS)
@settings(max_examples=200)
def test_spans_never_overlap_and_everything_comes_back(steps: list[tuple[bool, bool, int]]) -> None:
    allocator = Allocator(CAPACITY)
    held = []
    for give_back, at_end, number in steps:
        could_have = allocator.largest_if_freed(held[::2])
        assert allocator.largest_free_bytes <= could_have <= CAPACITY
        if give_back and held:
            allocator.free(held.pop(number % len(held)))
        else:
            span = allocator.allocate(number, at_end=at_end)
            if span is None:
                assert number > allocator.largest_free_bytes or allocator.largest_free_bytes == 0
            else:
                assert span.offset % ALIGNMENT == 0
                assert span.nbytes >= number
                held.append(span)
        allocator.check_integrity()
        assert allocator.free_bytes == CAPACITY - sum(span.nbytes for span in held)
    could_have = allocator.largest_if_freed(held[::2])
    for span in held[::2]:
        allocator.free(span)
    assert allocator.largest_free_bytes == could_have
    for span in held[1::2]:
        allocator.free(span)
    allocator.check_integrity()
    assert allocator.largest_free_bytes == CAPACITY


def test_the_lowest_fitting_span_is_taken() -> None:
    allocator = Allocator(10 * ALIGNMENT)
    spans = [allocator.allocate(ALIGNMENT) for _ in range(4)]
    assert spans[1] is not None and spans[2] is not None
    allocator.free(spans[2])
    allocator.free(spans[1])
    again = allocator.allocate(2 * ALIGNMENT)
    assert again is not None and again.offset == ALIGNMENT


def test_from_the_end_the_highest_fitting_span_is_taken() -> None:
    """So images, from the start, find room in one piece where KV caches of other sizes come and go."""
    allocator = Allocator(10 * ALIGNMENT)
    first, kv, second = (
        allocator.allocate(3 * ALIGNMENT),
        allocator.allocate(2 * ALIGNMENT, at_end=True),
        allocator.allocate(3 * ALIGNMENT),
    )
    assert [span and span.offset // ALIGNMENT for span in (first, kv, second)] == [0, 8, 3]
    assert first is not None
    allocator.free(first)
    assert allocator.allocate(3 * ALIGNMENT) == first


def test_a_span_is_given_back_once() -> None:
    allocator = Allocator(CAPACITY)
    span = allocator.allocate(1)
    assert span is not None
    allocator.free(span)
    try:
        allocator.free(span)
    except ValueError as error:
        assert "not allocated" in str(error)
    else:
        raise AssertionError("a double free went unnoticed")
    assert "0 spans used" in repr(allocator)
