"""Requests that nodes serve while they load: on a whole platform, over slow links, as users see it."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.otlp import OtlpReceiver, otlp_receiver
from tests.fixtures.platform import Platform

NODES = 4
MODEL = "coder"
# Prompts, and how many tokens each asks for: they end at different times, so that some are under way at any.
PROMPTS = {"def add(a, b):\n": 60, "for i in range(": 100, "class Tree:\n": 170, "import ": 290}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    prompt: str
    ids: tuple[int, ...]
    start_kind: str
    request_id: str
    trace_id: str


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, root: Path, receiver: OtlpReceiver) -> Iterator[Platform]:
    """Four nodes on four hosts, which export traces; over their links the model takes 11 s."""
    made = Platform(
        data=tmp_path_factory.mktemp("four") / "data",
        flags=(
            *("--nodes", str(NODES), "--hosts", str(NODES), "--link-rate", "12mbit"),
            *("--otlp-endpoint", receiver.endpoint),
        ),
        env={"OTEL_BSP_SCHEDULE_DELAY": "100"},
    )
    made.up()
    try:
        model = tmp_path_factory.mktemp("untied")
        untie(root / "functions" / "tiny-coder" / "model", model)
        limits = ("--max-instances", "2", "--target-concurrency", "32", "--keep-alive", "10m")
        made.run("deploy", str(model), "--name", MODEL, "--dtype", "float32", "--live", "pipeline", *limits)
        yield made
    finally:
        made.down()


def untie(model: Path, out: Path) -> None:
    """Write the same model with an untied head, which is at the end of its image."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    raw = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    embedding = head["model.embed_tokens.weight"]
    start, end = embedding["data_offsets"]
    offsets = [len(data), len(data) + end - start]
    head["lm_head.weight"] = {**embedding, "data_offsets": offsets}
    packed = json.dumps(head).encode()
    packed += b" " * (-len(packed) % 8)
    written = len(packed).to_bytes(8, "little") + packed + data + data[start:end]
    (out / "model.safetensors").write_bytes(written)


def ask(four: Platform, prompt: str) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": PROMPTS[prompt], "temperature": 0}
    with four.http() as http:
        response = http.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True})
    assert response.status_code == 200, response.text
    return Answer(
        prompt=prompt,
        ids=tuple(response.json()["choices"][0]["token_ids"]),
        start_kind=response.headers["x-start-kind"],
        request_id=response.headers["x-request-id"],
        trace_id=response.headers.get("traceresponse", "--").split("-")[1],
    )


def holders(four: Platform) -> list[str]:
    return [node["id"] for node in four.nodes() if f"{MODEL}:1" in node["tiers"]["host"]]


def states(four: Platform) -> list[str]:
    return [instance["state"] for instance in four.instances(MODEL)]


def moves(four: Platform) -> float:
    with four.http() as http:
        metrics = http.get("/metrics").text
    return float(re.findall(r"^hypercast_live_moves_total (\S+)$", metrics, re.MULTILINE)[0])


def scale(four: Platform, instances: int, *nodes: str) -> None:
    with four.http() as http:
        wish = {"instances": instances, "on": list(nodes), "wait": False}
        assert http.post(f"/admin/functions/{MODEL}/scale", json=wish).status_code == 200


@pytest.fixture(scope="module")
def expected(four: Platform) -> dict[str, tuple[int, ...]]:
    """Return what a whole instance answers; then none runs it, and one host holds it."""
    answers = {prompt: ask(four, prompt).ids for prompt in PROMPTS}
    stop(four)
    assert len(holders(four)) == 1
    return answers


def check_trace(receiver: OtlpReceiver, trace_id: str, nodes: list[str]) -> None:
    """Check that one trace has the gateway, the node with the head and the stages of both nodes."""
    spans = receiver.trace(trace_id, "POST /v1/completions", f"text_completion {MODEL}", "generate", "stage")
    by_id = {span.span_id: span for span in spans}
    runs = [span for span in spans if span.name == "generate" and "hypercast.pipeline" in span.attributes]
    stages = [span for span in spans if span.name == "stage"]
    assert {by_id[run.parent_id].service for run in runs} == {"hypercast-gateway"}
    assert {span.instance for span in stages} == set(nodes) >= {run.instance for run in runs}
    assert {stage.parent_id for stage in stages} <= {run.span_id for run in runs}


def stop(four: Platform) -> None:
    four.run("scale", MODEL, "--instances", "0")
    four.until("none runs it", lambda: not four.instances(MODEL))


def test_requests_wait_at_a_node_that_loads_alone(
    four: Platform, expected: dict[str, tuple[int, ...]]
) -> None:
    (first,) = holders(four)
    cold = next(node["id"] for node in four.nodes() if node["id"] != first)
    scale(four, 1, cold)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: ask(four, prompt), PROMPTS))
    assert {answer.prompt: answer.ids for answer in answers} == expected
    assert {answer.start_kind for answer in answers} == {"live"}
    for answer in answers:
        (part,) = four.json("usage", "show", answer.request_id)["gpu"]
        assert part["node"] == cold
    stop(four)
    four.run("usage", "check", "--wait", "60s")


def test_requests_are_served_while_two_nodes_load_and_notice_nothing(
    four: Platform, expected: dict[str, tuple[int, ...]], receiver: OtlpReceiver
) -> None:
    (first, *others) = holders(four)
    second = others[0] if others else next(node["id"] for node in four.nodes() if node["id"] != first)
    four.run("warm", MODEL, "--on", second)
    four.until("two hold it", lambda: set(holders(four)) == {first, second})
    cold = [node["id"] for node in four.nodes() if node["id"] not in (first, second)]

    scale(four, 2, *cold)
    four.until("both load", lambda: len(states(four)) == 2)
    over = threading.Event()

    def keep_asking(prompt: str) -> list[Answer]:
        found = []
        while not over.is_set():
            found.append(ask(four, prompt))
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asking = [pool.submit(keep_asking, prompt) for prompt in PROMPTS]
        try:
            four.until("both are ready", lambda: states(four) == ["ready", "ready"])
        finally:
            over.set()
        answers = [answer for one in asking for answer in one.result()]

    # The first requests came long before any node had the model: they were answered by both together.
    live = [answer for answer in answers if answer.start_kind == "live"]
    assert {answer.prompt for answer in live} == PROMPTS.keys()
    assert [answer for answer in answers if answer.ids != expected[answer.prompt]] == []
    assert moves(four) > 0
    records = [four.json("usage", "show", answer.request_id) for answer in live]
    assert all({part["node"] for part in record["gpu"]} >= set(cold) for record in records)
    assert {record["start_kind"] for record in records} == {"live"}
    check_trace(receiver, next(answer.trace_id for answer in live if answer.trace_id), cold)
    four.run("scale", MODEL, "--instances", "0")
    four.run("usage", "check", "--wait", "60s")
