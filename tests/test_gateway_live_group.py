"""What the starts of one function version tell, and the pipelines that follow: decisions alone."""

from itertools import count

from gateway.live_group import Close, GroupSettings, LiveGroup, Open, Switch, Todo
from gateway.model_layers import even_layers

LAYERS = 8
ALL = (1 << LAYERS) - 1
LOW, HIGH = 0b00001111, 0b11110000


def make_group(*, head_first: bool = False) -> LiveGroup:
    numbers = count()
    settings = GroupSettings(head_first=head_first, max_concurrency=8)
    return LiveGroup(even_layers(LAYERS), settings, lambda: f"p{next(numbers)}")


def told(todos: tuple[Todo, ...]) -> list[str]:
    """Each in a line, without its reason."""
    lines = []
    for todo in todos:
        match todo:
            case Open(pipeline=one):
                stages = " ".join(f"{s.instance_id}[{s.first},{s.last})" for s in one.stages)
                lines.append(f"open {one.name} {stages}")
            case Switch(pipeline_id=id_, switch=switch):
                lines.append(f"switch {switch.instance_id} of {switch.sharers} in {id_}")
            case Close(pipeline_id=id_):
                lines.append(f"close {id_}")
    return lines


def formed(group: LiveGroup) -> LiveGroup:
    """Of the instances ia and ib, on the nodes a and b."""
    assert group.begin("a", "ia", 0) == group.begin("b", "ib", 1) == ()
    assert group.holds("a", "ia", LOW) == ()
    assert told(group.holds("b", "ib", HIGH)) == ["open p0.0 ia[0,4) ib[4,8)"]
    return group


def test_a_pair_serves_until_both_are_ready() -> None:
    group = formed(make_group())
    assert group.holds("a", "ia", ALL) == ()  # it does not take calls yet
    assert told(group.ready("a", "ia")) == ["switch ia of 2 in p0"]
    assert told(group.ready("b", "ib")) == ["switch ib of 1 in p0", "close p0"]
    assert group.is_over


def test_the_head_is_where_its_bytes_are() -> None:
    for head_first, place in ((False, 1), (True, 0)):
        group = make_group(head_first=head_first)
        group.begin("a", "ia", 0)
        group.begin("b", "ib", 1)
        group.holds("a", "ia", LOW)
        (opened,) = group.holds("b", "ib", HIGH)
        assert isinstance(opened, Open) and opened.pipeline.head == place
        assert opened.pipeline.slots == 2 * 2 * 8  # twice what its two nodes take alone


def test_what_another_instance_of_a_node_tells_is_not_heeded() -> None:
    group = formed(make_group())
    assert group.holds("a", "older", ALL) == group.ready("a", "older") == group.gone("a", "older", "x") == ()
    assert told(group.begin("a", "newer", 0)) == ["close p0"]
    assert told(group.holds("a", "newer", LOW)) == ["open p1.0 newer[0,4) ib[4,8)"]


def test_who_is_left_goes_on_with_others() -> None:
    group = formed(make_group())
    group.begin("c", "ic", 0)
    group.holds("c", "ic", LOW)
    lost = group.lost("p0", 0, "a", "a: its link broke")
    assert told(lost) == ["open p0.1 ic[0,4) ib[4,8)"]
    assert group.lost("p0", 0, "b", "b: the old one") == ()  # nobody waits for that any more
    assert told(group.gone("b", "ib", "it died")) == ["close p0"]
    assert group.ready("c", "ic") == () and group.is_over


def test_a_node_that_serves_alone_is_no_stage() -> None:
    group = make_group()
    group.begin("a", "ia", 0)
    assert group.ready("a", "ia") == () and group.is_over
    group.begin("b", "ib", 1)
    assert group.holds("b", "ib", HIGH) == ()
