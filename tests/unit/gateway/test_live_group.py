"""Decisions on the pipelines of one function version, from the reports of its starts."""

from itertools import count

from gateway.live.group import (
    ClosePipeline,
    LiveGroup,
    LiveGroupAction,
    PipelineModel,
    PromoteMember,
    StartPipeline,
)
from gateway.live.model_layers import even_layers

LAYERS = 8
ALL = (1 << LAYERS) - 1
LOW, HIGH = 0b00001111, 0b11110000


def make_group(*, head_first: bool = False) -> LiveGroup:
    numbers = count()
    settings = PipelineModel(head_first=head_first, max_concurrency=8)
    return LiveGroup(even_layers(LAYERS), settings, lambda: f"p{next(numbers)}")


def described(actions: tuple[LiveGroupAction, ...]) -> list[str]:
    """Each in a line, without its reason."""
    lines = []
    for todo in actions:
        match todo:
            case StartPipeline(pipeline=one):
                stages = " ".join(f"{s.instance_id}[{s.first},{s.last})" for s in one.stages)
                lines.append(f"open {one.name} {stages}")
            case PromoteMember(pipeline_id=id_, switch=switch):
                lines.append(f"switch {switch.instance_id} of {switch.sharers} in {id_}")
            case ClosePipeline(pipeline_id=id_):
                lines.append(f"close {id_}")
    return lines


def formed(group: LiveGroup) -> LiveGroup:
    """Of the instances ia and ib, on the nodes a and b."""
    assert group.add("a", "ia", 0) == group.add("b", "ib", 1) == ()
    assert group.on_layers("a", "ia", LOW) == ()
    assert described(group.on_layers("b", "ib", HIGH)) == ["open p0.0 ia[0,4) ib[4,8)"]
    return group


def test_a_pair_serves_until_both_are_ready() -> None:
    group = formed(make_group())
    assert group.on_layers("a", "ia", ALL) == ()  # it does not take calls yet
    assert described(group.on_ready("a", "ia")) == ["switch ia of 2 in p0"]
    assert described(group.on_ready("b", "ib")) == ["switch ib of 1 in p0", "close p0"]
    assert group.is_over


def test_the_head_is_where_its_bytes_are() -> None:
    for head_first, place in ((False, 1), (True, 0)):
        group = make_group(head_first=head_first)
        group.add("a", "ia", 0)
        group.add("b", "ib", 1)
        group.on_layers("a", "ia", LOW)
        (opened,) = group.on_layers("b", "ib", HIGH)
        assert isinstance(opened, StartPipeline) and opened.pipeline.head == place
        assert opened.pipeline.slots == 2 * 2 * 8  # twice what its two nodes take alone


def test_reports_of_another_instance_of_a_node_are_ignored() -> None:
    group = formed(make_group())
    assert (
        group.on_layers("a", "older", ALL)
        == group.on_ready("a", "older")
        == group.remove("a", "older", "x")
        == ()
    )
    assert described(group.add("a", "newer", 0)) == ["close p0"]
    assert described(group.on_layers("a", "newer", LOW)) == ["open p1.0 newer[0,4) ib[4,8)"]


def test_the_remaining_member_continues_with_others() -> None:
    group = formed(make_group())
    group.add("c", "ic", 0)
    group.on_layers("c", "ic", LOW)
    lost = group.on_lost("p0", 0, "a", "a: its link broke")
    assert described(lost) == ["open p0.1 ic[0,4) ib[4,8)"]
    assert group.on_lost("p0", 0, "b", "b: the old one") == ()  # that epoch is closed
    assert described(group.remove("b", "ib", "it died")) == ["close p0"]
    assert group.on_ready("c", "ic") == () and group.is_over


def test_a_node_that_serves_alone_is_no_stage() -> None:
    group = make_group()
    group.add("a", "ia", 0)
    assert group.on_ready("a", "ia") == () and group.is_over
    group.add("b", "ib", 1)
    assert group.on_layers("b", "ib", HIGH) == ()
