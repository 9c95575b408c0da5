"""Draws what benchmarks.live_picture recorded."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.records import new_figure, save_figure

_BIN_S = 0.5
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")
_HELD, _STAGE = "0.82", 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """A node runs the layers `[first, last)` of pipeline `name` from `begin_s` to `end_s`."""

    name: str
    node: str
    first: int
    last: int
    begin_s: float
    end_s: float


def spans(events: list[dict[str, Any]], end_s: float) -> Iterator[StageSpan]:
    """Yield the stages of all pipelines, from their announcement to their removal."""
    open_: dict[str, tuple[float, dict[str, Any]]] = {}
    for event in [*(one for one in events if one["kind"] == "live"), {"at_s": end_s, "pipelines": []}]:
        announced = {f"{one['pipeline_id']}.{one['epoch']}": one for one in event["pipelines"]}
        for name in [name for name in open_ if name not in announced]:
            begin_s, pipeline = open_.pop(name)
            for stage in pipeline["stages"]:
                place = {key: stage[key] for key in ("node", "first", "last")}
                yield StageSpan(name=name, begin_s=begin_s, end_s=event["at_s"], **place)
        for name, pipeline in announced.items():
            open_.setdefault(name, (event["at_s"], pipeline))


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a PNG: per node the layers that it holds and the stages that it runs, with tokens below."""
    events, answers = record["events"], record["answers"]
    end_s = max((at_s for answer in answers for at_s in answer["arrived_s"]), default=1.0)
    nodes = sorted({event["node"] for event in events if event["kind"] == "held"})
    layers = max((event["layers"] for event in events if event["kind"] == "held"), default=1).bit_length()
    figure = new_figure(11, 2.2 + 1.25 * len(nodes))
    panels = figure.subplots(
        len(nodes) + 1, 1, sharex=True, squeeze=False, height_ratios=[*[1.0] * len(nodes), 1.6]
    )[:, 0]
    stages = list(spans(events, end_s))
    names = list(dict.fromkeys(span.name for span in stages))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    for panel, node in zip(panels, nodes, strict=False):
        _lane(panel, node, layers, events, end_s)
        for span in stages:
            if span.node == node:
                width = span.end_s - span.begin_s
                place = (span.begin_s, span.first)
                panel.broken_barh(
                    [(place[0], width)],
                    (place[1], span.last - span.first),
                    alpha=_STAGE,
                    facecolors=colours[span.name],
                    edgecolor="black",
                    linewidth=0.6,
                )
    _tokens(panels[-1], answers, end_s)
    for index, name in enumerate(names):
        panels[0].plot([], [], "s", color=colours[name], label=f"stage of pipeline {index + 1}")
    panels[0].plot([], [], "s", color=_HELD, label="layers that the node can run")
    panels[0].plot([], [], color="black", linestyle="--", label="ready: serves by itself")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(_title(record, events), fontsize=9)
    save_figure(figure, path)


def _lane(panel: Any, node: str, layers: int, events: list[dict[str, Any]], end_s: float) -> None:
    since: dict[int, float] = {}
    for event in events:
        if event["kind"] == "held" and event["node"] == node:
            for layer in range(layers):
                if event["layers"] >> layer & 1:
                    since.setdefault(layer, event["at_s"])
        if event["kind"] == "instance" and event["node"] == node and event["state"] == "ready":
            panel.axvline(event["at_s"], color="black", linestyle="--", linewidth=1.2)
            for layer in range(layers):
                since.setdefault(layer, event["at_s"])
    for layer, begin_s in since.items():
        panel.broken_barh([(begin_s, end_s - begin_s)], (layer, 1), facecolors=_HELD)
    panel.set(ylim=(0, layers), yticks=range(0, layers + 1, 4))
    panel.set_ylabel(f"{node}\nlayer", fontsize=8)


def _tokens(panel: Any, answers: list[dict[str, Any]], end_s: float) -> None:
    counts: Counter[int] = Counter(int(at_s / _BIN_S) for answer in answers for at_s in answer["arrived_s"])
    bins = range(int(end_s / _BIN_S) + 1)
    panel.bar(
        [index * _BIN_S for index in bins],
        [counts[index] / _BIN_S for index in bins],
        _BIN_S,
        align="edge",
        color="0.7",
    )
    for kind, colour in (("live", "tab:red"), ("", "tab:blue")):
        firsts = [
            answer["arrived_s"][0]
            for answer in answers
            if answer["arrived_s"] and (answer["start_kind"] == "live") == bool(kind)
        ]
        label = "first token, served live" if kind else "first token, served by one node"
        panel.plot(firsts, [0] * len(firsts), "|", color=colour, ms=14, label=f"{label} ({len(firsts)})")
    panel.set(ylabel="tokens/s", xlabel="seconds since the scale request", xlim=(0, end_s))
    panel.legend(fontsize=8, loc="upper left")


def _title(record: dict[str, Any], events: list[dict[str, Any]]) -> str:
    params = record["params"]
    reason = next((event["reason"] for event in events if event["kind"] == "live"), "")
    return (
        f"{params['image_bytes'] / 1e6:.0f} MB from {params['sources']} to {params['loading']} nodes over "
        f"{params['link_rate']} links, {params['requests']} requests in flight\n{reason}"
    )
