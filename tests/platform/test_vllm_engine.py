"""Functions with engine: vllm, with a stand-in for vLLM: real processes, sockets and casts, other tokens."""

import fcntl
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from anthropic import Anthropic
from openai import APIError, BadRequestError, OpenAI

from gateway.fakes.node import tokens_after
from tests.fixtures.checkpoints import VOCABULARY, write_checkpoint
from tests.fixtures.fake_vllm import PLUGIN, interpreter
from tests.fixtures.platform import Platform

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a file that keeps stand-ins from starting while it is locked."""
    path = tmp_path_factory.mktemp("gate") / "gate"
    path.touch()
    return path


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory, gate: Path) -> Iterator[Platform]:
    """Two nodes on two virtual hosts, of which both have the stand-in."""
    folder = tmp_path_factory.mktemp("vllm")
    running = Platform(
        data=folder / "data",
        flags=(
            *("--nodes", "2", "--hosts", "2", "--vllm-memory", "16GiB"),
            *("--vllm-python", str(interpreter(folder, gate=gate, token_s=0.01))),
        ),
    )
    running.up()
    yield running
    running.down()


@pytest.fixture(scope="module")
def tiny(vllm: Platform, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Deploy a model that the native engine runs, too."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint("llama", folder, seed=41)
    vllm.run("deploy", str(folder), "--name", "tiny", "--engine", "vllm", "--keep-alive", "10m")
    return "tiny"


def _client(platform: Platform) -> OpenAI:
    return OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0)


def _ready(platform: Platform, function: str, count: int = 1) -> list[dict[str, Any]]:
    """Scale the function, and wait until vLLM serves on so many nodes."""
    platform.run("scale", function, "--instances", str(count))

    def served() -> list[dict[str, Any]]:
        found = [one for one in platform.instances(function) if one["engine"] == "vllm"]
        return found if len([one for one in found if one["state"] == "ready"]) == count else []

    found: list[dict[str, Any]] = platform.until(f"vLLM serves {function}", served)
    return found


def _servers(node_pid: int) -> list[psutil.Process]:
    """Return the servers of a node, without their guards."""
    found = []
    for process in psutil.Process(node_pid).children(recursive=True):
        words = process.cmdline()
        if "vllm.entrypoints.openai.api_server" in words and "invoker.vllm.launch" not in words:
            found.append(process)
    return found


def _ids(platform: Platform, function: str, tokens: int, **fields: Any) -> list[int]:
    with _client(platform) as client:
        answer = client.completions.create(
            model=function,
            prompt=list(PROMPT),
            max_tokens=tokens,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True, **fields},
        )
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def _stream(platform: Platform, function: str, tokens: int) -> Iterator[list[int]]:
    with _client(platform) as client:
        for chunk in client.completions.create(
            model=function,
            prompt=list(PROMPT),
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ):
            yield chunk.choices[0].token_ids or []  # type: ignore[attr-defined]


def test_the_native_engine_serves_first(vllm: Platform, tiny: str, gate: Path) -> None:
    described = vllm.json("describe", tiny)["current"]
    assert (described["engine"], described["native_first"]) == ("vllm", True)
    vllm.run("scale", tiny, "--instances", "0")
    with gate.open() as closed:
        fcntl.flock(closed, fcntl.LOCK_EX)
        assert max(_ids(vllm, tiny, 4)) < VOCABULARY  # those of the stand-in go to 50,000
    _ready(vllm, tiny)
    assert _ids(vllm, tiny, 8) == tokens_after(PROMPT, 8)
    record = vllm.get("/admin/usage/report")["rows"]
    assert next(row for row in record if row["function"] == tiny)["completion_tokens"] == 12


def test_requests_pass_through_with_all_their_fields(vllm: Platform, tiny: str) -> None:
    _ready(vllm, tiny)
    with vllm.http() as http:
        body = {"model": tiny, "prompt": [1, 2], "max_tokens": 3, "logprobs": 1, "odd_field": {"a": [1]}}
        answer = http.post("/v1/completions", json=body)
        image = vllm.json("describe", tiny)["current"]["image"]
        assert answer.json()["image"] == image  # as the stand-in has read it, by the plug-in
        echo = answer.json()["echo"]
        assert echo["odd_field"] == {"a": [1]} and echo["logprobs"] == 1 and echo["model"] == tiny
        assert answer.headers["x-function-version"] == "1" and answer.headers["x-start-kind"] == "hot"
        refused = http.post("/v1/completions", json=body | {"max_tokens": 99_999})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request")
        assert "maximum context length" in refused.json()["error"]["message"]
        record = vllm.run("usage", "show", answer.headers["x-request-id"], "-o", "json")
    shown = json.loads(record.stdout)
    assert (shown["prompt_tokens"], shown["completion_tokens"], shown["status"]) == (2, 3, "ok")
    assert shown["billed_gpu_ms"] > 0


@pytest.mark.parametrize("wanted", [False, True])
def test_streams_show_the_usage_only_if_asked(vllm: Platform, tiny: str, wanted: bool) -> None:
    _ready(vllm, tiny)
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    with _client(vllm) as client:
        chunks = list(
            client.chat.completions.create(
                model=tiny,
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
                max_tokens=4,
                stream=True,
                **options,  # type: ignore[call-overload]
            )
        )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(said.split()) == 4
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == ([4] if wanted else [])


def test_other_protocols_pass_through_translated(vllm: Platform, tiny: str) -> None:
    _ready(vllm, tiny)
    options: Any = {"model": tiny, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    with Anthropic(base_url=vllm.url, api_key=vllm.key, max_retries=0) as claude:
        message = claude.messages.create(**options)
        with claude.messages.stream(**options) as stream:
            streamed = stream.get_final_message()
    for one in (message, streamed):
        assert len(one.content[0].text.split()) == 4  # type: ignore[union-attr]
        assert (one.usage.output_tokens, one.stop_reason) == (4, "max_tokens")
    with _client(vllm) as client:
        response = client.responses.create(model=tiny, input="hi", max_output_tokens=4)
        with client.responses.stream(model=tiny, input="hi", max_output_tokens=4) as events:
            *_, ended = events
    assert ended.type == "response.incomplete"
    for one in (response, ended.response):
        assert len(one.output_text.split()) == 4
        assert one.usage and one.usage.output_tokens == 4 and one.status == "incomplete"


def test_what_a_tenant_may_not_decide_is_refused(vllm: Platform, tiny: str) -> None:
    with _client(vllm) as client, pytest.raises(BadRequestError, match="priority cannot be set"):
        client.completions.create(model=tiny, prompt=[1], extra_body={"priority": -5})


def test_a_killed_server_loses_no_token(vllm: Platform, tiny: str) -> None:
    (instance,) = _ready(vllm, tiny)
    ids: list[int] = []
    for more in _stream(vllm, tiny, 200):
        if not ids:
            _ready(vllm, tiny, 2)  # else the native engine of the next instance would take over
            (server,) = _servers(instance["pid"])
            server.send_signal(signal.SIGKILL)
        ids += more
    assert ids == tokens_after(PROMPT, 200)
    vllm.until("the server is gone", lambda: not server.is_running())
    vllm.run("scale", tiny, "--instances", "1")


def test_a_server_that_dies_after_the_first_byte_ends_the_stream_with_an_error(
    vllm: Platform, tiny: str
) -> None:
    _ready(vllm, tiny)
    with _client(vllm) as client:
        said: list[str] = []
        with pytest.raises(APIError, match=r"lost|ended"):
            for chunk in client.completions.create(
                model=tiny,
                prompt=[1],
                max_tokens=9,
                logprobs=1,
                stream=True,
                extra_body={"die_after": 3},
            ):
                said += [choice.text for choice in chunk.choices]
    assert len(said) == 3


def test_a_killed_node_takes_its_servers_with_it(vllm: Platform, tiny: str) -> None:
    (instance,) = _ready(vllm, tiny)
    servers = _servers(instance["pid"])
    os.kill(instance["pid"], signal.SIGKILL)
    vllm.until("its servers are gone", lambda: not any(one.is_running() for one in servers))
    assert servers and _ids(vllm, tiny, 2)


def test_a_model_that_only_vllm_runs(vllm: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, seed=42)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["FakeForConditionalGeneration"], "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    native = vllm.run("deploy", str(tmp_path), "--name", "odd", check=False)
    assert native.returncode == 5 and "--engine vllm" in native.stderr
    vllm.run("deploy", str(tmp_path), "--name", "odd", "--engine", "vllm")
    assert vllm.json("describe", "odd")["current"]["native_first"] is False
    assert _ids(vllm, "odd", 5) == tokens_after(PROMPT, 5)
    assert [one["engine"] for one in vllm.instances("odd")] == ["vllm"]
    vllm.run("delete", "odd", "--yes")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("--trust-remote-code", 2, "not an option that a function may give"),
        ("--enable-auto-tool-choice", 5, "requires --tool-call-parser"),
        ("--max-model-len many", 5, "invalid int value"),
    ],
)
def test_arguments_are_checked_at_deploy(
    vllm: Platform, tmp_path: Path, arguments: str, code: int, words: str
) -> None:
    write_checkpoint("llama", tmp_path, seed=43)
    flags = ("--name", "bad", "--engine", "vllm", "--engine-args", arguments)
    done = vllm.run("deploy", str(tmp_path), *flags, check=False)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert "bad" not in vllm.run("list").stdout


def test_without_vllm_the_deploy_says_so(platform: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, seed=44)
    done = platform.run("deploy", str(tmp_path), "--name", "none", "--engine", "vllm", check=False)
    assert done.returncode == 5 and "--vllm-python" in done.stderr


def test_an_engine_beside_a_node_attaches_to_a_model(
    vllm: Platform, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from hypercast_vllm.attached import AttachError, attach

    sockets = [Path(one.laddr).with_suffix(".sock") for one in _unix_sockets(vllm) if ".attach" in one.laddr]
    path = str(sockets[0])
    with attach({"model": f"{tiny}:1"}, path) as image:
        names = [tensor.name for tensor in image.tensors()]
        assert "model.embed_tokens.weight" in names
        digest = hashlib.sha256(image.memory).hexdigest()
    assert digest == vllm.json("describe", tiny)["current"]["image"]
    for request, words in (
        ({"model": "nobody"}, "nobody"),
        ({"image": "ab"}, "no engine of this node"),
        ({}, "must"),
    ):
        with pytest.raises(AttachError, match=words):
            attach(request, path)
    with pytest.raises(AttachError, match="no node answers"):
        attach({"model": tiny}, path + ".gone")


def _unix_sockets(platform: Platform) -> list[Any]:
    pids = [node["pid"] for node in platform.nodes()]
    return [one for pid in pids for one in psutil.Process(pid).net_connections("unix") if one.laddr]


def test_no_vllm_python_is_an_error(tmp_path: Path, vllm: Platform) -> None:
    bad = tmp_path / "python"
    bad.write_text("#!/bin/sh\nexit 1\n")
    bad.chmod(0o700)
    up = ("up", "--detach", "--port", "0", "--data-dir", str(tmp_path / "data"), "--nodes", "1")
    done = vllm.run(*up, "--vllm-python", str(bad), check=False)
    assert done.returncode == 1 and "no Python that has vLLM" in done.stderr


def test_sequences_move_from_the_native_engine(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("slow")
    flags = ("--nodes", "1", "--vllm-memory", "16GiB")
    gate = folder / "gate"
    closed = gate.open("wb")
    fcntl.flock(closed, fcntl.LOCK_EX)
    python = interpreter(folder, gate=gate, plugin=False)
    slow = Platform(data=folder / "data", flags=(*flags, "--vllm-python", str(python)))
    slow.up()
    try:
        write_checkpoint("llama", tmp_path, seed=41)
        slow.run("deploy", str(tmp_path), "--name", "both", "--engine", "vllm")
        slow.run("deploy", str(tmp_path), "--name", "native")
        slow.run("scale", "both", "--instances", "1")
        slow.until("vLLM waits", Path(f"{gate}.waiting").exists)
        ids = list[int]()
        for more in _stream(slow, "both", 250):
            ids += more
            closed.close()
        native = _ids(slow, "native", 250)
        moved = next(at for at in range(250) if ids[at:] == tokens_after((*PROMPT, *ids[:at]), 250 - at))
        assert 0 < moved < 250 and ids[:moved] == native[:moved]
        with slow.http() as http:  # of a request that needs vLLM itself, from zero
            slow.run("scale", "both", "--instances", "0")
            body = {"model": "both", "prompt": [1], "max_tokens": 2, "logprobs": 1}
            assert http.post("/v1/completions", json=body).json()["echo"]["logprobs"] == 1
    finally:
        closed.close()
        slow.down()


def test_the_platform_leaves_no_server_behind(vllm: Platform, tiny: str) -> None:
    _ready(vllm, tiny, 2)
    servers = [server for node in vllm.nodes() for server in _servers(node["pid"])]
    assert len(servers) == 2
    vllm.run("scale", tiny, "--instances", "0")
    vllm.until("the servers are gone", lambda: not any(one.is_running() for one in servers))
    assert httpx2.get(f"{vllm.url}/livez").status_code == 200
