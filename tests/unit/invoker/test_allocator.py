from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.memory.allocator import Allocator
from registry.images.manifest import ALIGNMENT

CAPACITY = 64 * ALIGNMENT
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 20 * ALIGNMENT)), max_size=60)


@given(STEPS)
@settings(max_examples=200)
def test_spans_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(CAPACITY)
    held = []
    for give_back, number in steps:
        if give_back and held:
            allocator.free(held.pop(number % len(held)))
        else:
            span = allocator.allocate(number)
            if span is None:
                assert number > allocator.largest_free_bytes or allocator.largest_free_bytes == 0
            else:
                assert span.offset % ALIGNMENT == 0
                assert span.nbytes >= number
                held.append(span)
        allocator.check_integrity()
        assert allocator.free_bytes == CAPACITY - sum(span.nbytes for span in held)
    for span in held:
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
