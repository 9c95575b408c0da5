"""Emulated functions go to emulated nodes of their scale, and nothing else goes there."""

from dataclasses import replace

import pytest

from gateway.planning.placement import start_candidates, unschedulable_reason
from registry.records.function import FunctionTask
from tests.fixtures.control import make_node, make_version

REAL, EMULATED = make_node("real"), make_node("emulated", device="emulated:h800/1000/10")
OTHER = make_node("other", device="emulated:h800/10")
NODES = [REAL, EMULATED, OTHER]


def places(architecture: str) -> list[str]:
    version = replace(make_version(), architecture=architecture)
    found = start_candidates(
        version, NODES, used_images={}, reserved_bytes={}, instances={}, loading_hosts=()
    )
    return [site.id for site in found]


def test_a_model_goes_where_it_can_run() -> None:
    assert places("llama") == ["real"]
    assert places("emulated:llama2-13b/1000") == ["emulated"]
    assert places("emulated:llama2-13b/10") == ["other"]
    assert places("emulated:llama2-13b") == []


@pytest.mark.parametrize(
    ("architecture", "nodes", "words"),
    [
        ("llama", [EMULATED], "no node can run it: emulated:h800/1000/10 runs emulated models only"),
        ("emulated:llama2-13b/10", [REAL], "runs on emulated devices only"),
        ("emulated:llama2-13b/10", [EMULATED], "is at 1/10, emulated:h800/1000/10 at 1/1000"),
    ],
)
def test_why_nobody_can_run_it_is_said(architecture: str, nodes: list, words: str) -> None:
    assert words in unschedulable_reason(replace(make_version(), architecture=architecture), nodes)


def test_handlers_go_anywhere() -> None:
    version = replace(make_version(image=None, task=FunctionTask.HANDLER), architecture="builtin:echo")
    assert unschedulable_reason(version, [EMULATED]) == ""
    assert start_candidates(
        version, [EMULATED], used_images={}, reserved_bytes={}, instances={}, loading_hosts=()
    )
