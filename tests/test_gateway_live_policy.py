"""When a function goes live, and how keys and values come to another node."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.live_policy import LiveDecision, Outlook, decide_live
from registry.live import Live

SECONDS = st.one_of(st.floats(0.0, 100.0), st.just(inf))
OUTLOOKS = st.builds(Outlook, wait_s=SECONDS, pipeline_s=SECONDS, queue_s=SECONDS, zigzag_s=SECONDS)


@pytest.mark.parametrize(
    ("setting", "outlook", "target_s", "way", "reason"),
    [
        ("off", Outlook(wait_s=9.0, pipeline_s=1.0), 1.0, "off", "live is off"),
        ("pipeline", Outlook(wait_s=0.1, pipeline_s=0.05), None, "pipeline", "live is pipeline"),
        (
            "pipeline",
            Outlook(wait_s=9.0),
            1.0,
            "off",
            "live is pipeline, but no nodes that load will hold all layers between them",
        ),
        ("pipeline", Outlook(wait_s=9.0, alone=True), None, "pipeline", "live is pipeline"),
        (
            "auto",
            Outlook(wait_s=9.0, alone=True),
            1.0,
            "pipeline",
            "auto: waiting takes 9.00 s to the first token, the target is 1.00 s; "
            "nodes that follow can serve with it",
        ),
        (
            "zigzag",
            Outlook(wait_s=9.0, pipeline_s=1.0),
            1.0,
            "off",
            "live is zigzag, but no overloaded instance is there to be helped",
        ),
        (
            "zigzag",
            Outlook(wait_s=9.0, queue_s=8.0, zigzag_s=4.0, pipeline_s=1.0),
            None,
            "zigzag",
            "live is zigzag",
        ),
        ("auto", Outlook(wait_s=9.0, pipeline_s=1.0), None, "off", "auto: the function has no TTFT target"),
        (
            "auto",
            Outlook(wait_s=0.5, pipeline_s=0.1),
            1.0,
            "off",
            "auto: waiting takes 500.0 ms to the first token, the target is 1.00 s",
        ),
        (
            "auto",
            Outlook(wait_s=5.0, queue_s=0.7, pipeline_s=0.1),
            1.0,
            "off",
            "auto: waiting takes 700.0 ms to the first token, the target is 1.00 s",
        ),
        (
            "auto",
            Outlook(wait_s=2.0, pipeline_s=0.5),
            1.0,
            "pipeline",
            "auto: waiting takes 2.00 s to the first token, the target is 1.00 s; pipeline takes 500.0 ms",
        ),
        (
            "auto",
            Outlook(wait_s=2.0, pipeline_s=1.5, queue_s=3.0, zigzag_s=1.2),
            1.0,
            "zigzag",
            "auto: waiting takes 2.00 s to the first token, the target is 1.00 s; "
            "zigzag takes 1.20 s, pipeline 1.50 s",
        ),
        (
            "auto",
            Outlook(wait_s=2.0, pipeline_s=2.5),
            1.0,
            "off",
            "auto: waiting takes 2.00 s to the first token, the target is 1.00 s; nothing is sooner",
        ),
        (
            "auto",
            Outlook(wait_s=inf, pipeline_s=2.5),
            1.0,
            "pipeline",
            "auto: waiting takes for ever to the first token, the target is 1.00 s; pipeline takes 2.50 s",
        ),
    ],
)
def test_decisions_and_their_reasons(
    setting: str, outlook: Outlook, target_s: float | None, way: str, reason: str
) -> None:
    assert decide_live(Live(setting), outlook, target_s) == LiveDecision(way=Live(way), reason=reason)


@given(outlook=OUTLOOKS, target_s=st.floats(0.01, 100.0))
def test_auto_goes_live_only_for_the_target_and_only_where_it_helps(
    outlook: Outlook, target_s: float
) -> None:
    decision = decide_live(Live.AUTO, outlook, target_s)
    assert decision.way is not Live.AUTO and "\n" not in decision.reason
    best_s = min(outlook.live_s(Live.PIPELINE), outlook.live_s(Live.ZIGZAG))
    if outlook.plain_s <= target_s:
        assert decision.way is Live.OFF
    elif best_s < outlook.plain_s:
        assert outlook.live_s(decision.way) == best_s and decision.way is not Live.OFF
    else:
        assert decision.way is Live.OFF


@given(outlook=OUTLOOKS, setting=st.sampled_from([Live.PIPELINE, Live.ZIGZAG]))
def test_a_set_way_is_taken_wherever_it_can_be(outlook: Outlook, setting: Live) -> None:
    can = {Live.PIPELINE: outlook.pipeline_s, Live.ZIGZAG: outlook.zigzag_s}[setting] < inf
    assert decide_live(setting, outlook, None).way is (setting if can else Live.OFF)
