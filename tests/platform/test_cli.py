"""The command line against a running platform, as users and operators type it."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from openai import OpenAI, PermissionDeniedError
from transformers import AutoModelForCausalLM

from registry.images.plan import image_chunks, plan_checkpoint
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.decoders import write_decoder
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import ROOT, Platform, run_cli

TWO_TOKENS = json.dumps({"prompt": [5], "max_tokens": 2, "ignore_eos": True})
ENDLESS = json.dumps({"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True})


@pytest.fixture(scope="module")
def tiny(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    write_checkpoint("llama", folder, seed=41)
    platform.run("deploy", str(folder), "--name", "cli-tiny", "--keep-alive", "10m")
    yield "cli-tiny"
    platform.run("delete", "cli-tiny", "--yes")


@contextmanager
def started(platform: Platform, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **platform.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_data_is_on_stdout_in_each_form(platform: Platform, tiny: str) -> None:
    listed = platform.run("list")
    assert listed.stderr == "" and tiny in listed.stdout and "MiB" in listed.stdout
    described = platform.json("describe", tiny)
    assert f"ago by key {described['current']['deployed_by']}\n" in platform.run("describe", tiny).stdout
    row = next(line for line in platform.run("list", "-o", "csv").stdout.splitlines() if tiny in line)
    assert row.split(",")[:2] == [tiny, "1"] and str(described["current"]["image_bytes"]) in row
    answer = json.loads(platform.run("invoke", tiny, "-d", TWO_TOKENS).stdout)
    assert answer["usage"]["completion_tokens"] == 2
    key = platform.json("keys", "create", "--tenant", "cli")
    assert len(platform.run("keys", "create", "--tenant", "cli").stdout.split()) == 1
    assert key["key"] not in platform.run("keys", "list", "-o", "json").stdout


def test_a_model_that_no_engine_runs_is_refused_before_it_is_loaded(
    platform: Platform, tmp_path: Path
) -> None:
    write_decoder("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 200}))
    refused = platform.run("deploy", str(tmp_path), "--name", "odd", check=False)
    assert refused.returncode == 5
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("hypercast: ")]
    assert re.match(r"hypercast: model\.layers\.0\..* has shape .*, config.json implies", line)
    assert "odd" not in platform.run("list").stdout


def test_two_functions_of_one_image_are_both_shown(platform: Platform, tiny: str, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "again", seed=41)
    done = platform.run("deploy", str(tmp_path / "again"), "--name", "cli-twin")
    assert "has it all already" in done.stderr
    both = {"cli-twin:1", f"{tiny}:1"}
    platform.until(
        "a node holds both", lambda: any(both <= set(node["tiers"]["host"]) for node in platform.nodes())
    )
    platform.run("delete", "cli-twin", "--yes")
    assert platform.json("describe", tiny)["name"] == tiny


def test_a_pulled_model_is_a_folder_that_transformers_loads(
    platform: Platform, tiny: str, tmp_path: Path
) -> None:
    write_checkpoint("llama", tmp_path / "source", seed=41)
    pulled = platform.run("pull", tiny)
    assert f"{tiny}:1 is in the memory of host" in pulled.stderr
    folder = Path(pulled.stdout.strip())
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "source").state_dict()
    assert found.keys() == source.keys() and all(found[name].equal(source[name]) for name in found)
    shown = platform.json("pull", tiny, "--on", platform.nodes()[0]["id"])
    assert Path(shown["folder"]).is_dir() and shown["node"] == platform.nodes()[0]["id"]
    platform.run("evict", tiny)
    assert not folder.exists() and not Path(shown["folder"]).exists()


def test_ctrl_c_during_a_stream_frees_the_sequence(platform: Platform, tiny: str) -> None:
    platform.run("scale", tiny, "--instances", "1")
    with started(platform, "invoke", tiny, "-d", ENDLESS, "-v") as process:
        assert process.stderr is not None
        request_id = process.stderr.readline().removeprefix("x-request-id: ").strip()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "Traceback" not in said

    def shown() -> str:
        return platform.run("usage", "show", request_id, "-o", "json", check=False).stdout

    record = json.loads(platform.until("its record is there", shown))
    assert record["status"] == "cancelled" and record["completion_tokens"] < 500


def test_ctrl_c_ends_the_wait_for_a_job_which_runs_on(platform: Platform, tiny: str) -> None:
    body = json.dumps(json.loads(ENDLESS) | {"stream": False})
    with started(platform, "predict", tiny, "-d", body, "--id", "ctrl-c", "--wait") as process:
        assert process.stderr is not None and "ctrl-c: " in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "hypercast jobs show ctrl-c" in said and "Traceback" not in said
    assert platform.json("jobs", "show", "ctrl-c")["status"] in ("starting", "processing")
    platform.run("jobs", "cancel", "ctrl-c")
    ended = platform.run("jobs", "wait", "ctrl-c", "-o", "json", check=False)
    assert ended.returncode == 1 and json.loads(ended.stdout)["status"] == "canceled"


def test_ctrl_c_ends_the_log_quietly(platform: Platform, tiny: str) -> None:
    platform.run("scale", tiny, "--instances", "1")
    with started(platform, "logs", tiny, "-f") as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and said.strip() == "interrupted"
    instance = platform.instances(tiny)[0]  # its lines outlive its node in the node's file
    assert instance["instance_id"] in (platform.data / "logs" / f"{instance['node']}.log").read_text()


def test_an_interrupted_upload_goes_on_where_it_was(platform: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "model", seed=42)
    image = b"".join(bytes(view) for view in image_chunks(plan_checkpoint(tmp_path / "model", "auto")))
    digest = hashlib.sha256(image).hexdigest()
    with platform.http() as http:
        first = http.patch(
            f"/admin/blobs/{digest}",
            content=image[:300_000],
            headers={"upload-offset": "0", "upload-length": str(len(image))},
        )
        assert first.headers["upload-offset"] == "300000"
    assert platform.json("deploy", str(tmp_path / "model"), "--name", "cli-resumed")["image"] == digest
    platform.run("delete", "cli-resumed", "--yes")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("describe", "nobody"), 4, "there is no function 'nobody'"),
        (("invoke", "nobody", "-p", "x"), 4, "nobody"),
        (("invoke", "cli-tiny", "-p", "x"), 2, "no tokenizer"),
        (
            ("scale", "cli-tiny", "--instances", "1", "--on", "mars"),
            4,
            "no node 'mars'; usable nodes: node-0",
        ),
        (("scale", "cli-tiny", "--instances", "9"), 2, "9 instances need as many nodes"),
        (("warm", "cli-tiny", "--on", "mars"), 4, "no node 'mars'"),
        (("pull", "cli-tiny", "--on", "mars"), 4, "no node 'mars'"),
        (("usage", "show", "req-none"), 4, "req-none"),
        (("list", "--api-key", "hc_0123456789abcdef_wrong"), 3, "API key"),
        (("deploy", "{pickle}", "--name", "x"), 5, "pickle"),
        (("up", "--data-dir", "{data}", "--port", "0"), 1, "already running at http"),
    ],
)
def test_failures_have_one_clear_line_and_their_code(
    platform: Platform, tiny: str, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    done = platform.run(
        *(argument.format(pickle=tmp_path, data=platform.data) for argument in arguments), check=False
    )
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_a_key_for_one_function_sees_and_calls_no_other(platform: Platform, tiny: str) -> None:
    made = platform.json("keys", "create", "--tenant", "narrow", "--function", "another")
    with OpenAI(base_url=f"{platform.url}/v1", api_key=made["key"], max_retries=0) as client:
        assert [model.id for model in client.models.list()] == []
        with pytest.raises(PermissionDeniedError):
            client.completions.create(model=tiny, prompt=[5])
    assert platform.run("nodes", "--api-key", made["key"], check=False).returncode == 3
    assert platform.run("usage", "report", "--api-key", made["key"], "-o", "csv").stdout.count("\n") == 1
    platform.run("keys", "revoke", made["id"])
    assert platform.run("usage", "report", "--api-key", made["key"], check=False).returncode == 3


def test_an_idle_instance_leaves_and_the_next_call_wakes_it(platform: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "brief", seed=43)
    platform.run("deploy", str(tmp_path / "brief"), "--name", "cli-brief", "--keep-alive", "200ms")
    call = ("invoke", "cli-brief", "-d", '{"prompt": [5], "max_tokens": 1}', "-v")
    platform.run(*call)
    platform.until("it has left", lambda: not platform.instances("cli-brief"))
    assert "x-start-kind: warm" in platform.run(*call).stderr
    platform.run("delete", "cli-brief", "--yes")
    assert platform.run(*call, check=False).returncode == 4


def test_a_deploy_names_the_version_that_it_replaces_and_keeps_the_task(
    platform: Platform, tiny: str, tmp_path: Path
) -> None:
    write_checkpoint("llama", tmp_path / "model", seed=44)
    first = platform.run("deploy", str(tmp_path / "model"), "--name", "cli-race")
    assert "cli-race: version 1 (new)" in first.stderr
    for step in ("uploading ", "registering; loading the first copy into host memory"):
        assert any(line.startswith(step) for line in first.stderr.splitlines())
    refused = platform.run("deploy", "builtin:echo", "--name", "cli-race", check=False)
    assert (refused.returncode, "--force" in refused.stderr) == (5, True), refused.stderr
    with platform.http() as http:
        body = {"name": "cli-race", "task": "handler", "architecture": "builtin:echo"}
        assert http.post("/admin/functions", json=body).status_code == 409
    forced = platform.run("deploy", "builtin:echo", "--name", "cli-race", "--force")
    assert "cli-race: version 2 (was 1, LlamaForCausalLM)" in forced.stderr
    back = platform.run("rollback", "cli-race")
    assert "version 1 (was 2)" in back.stderr
    platform.run("delete", "cli-race", "--yes")


def test_a_packed_folder_is_deployed_as_its_checkpoint_is(platform: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "model", seed=45)
    packed = platform.json("pack", str(tmp_path / "model"), "--out", str(tmp_path / "packed"))
    made = platform.json("deploy", str(tmp_path / "packed"))
    assert (made["name"], made["image"]) == ("packed", packed["image"])
    answer = json.loads(platform.run("invoke", "packed", "-d", TWO_TOKENS).stdout)
    assert answer["usage"]["completion_tokens"] == 2
    platform.run("delete", "packed", "--yes")
    with (tmp_path / "packed" / "model.safetensors").open("r+b") as image:
        image.seek(-1, os.SEEK_END)
        image.write(b"\x7f")
    damaged = platform.run("deploy", str(tmp_path / "packed"), check=False)
    assert (damaged.returncode, "damaged" in damaged.stderr) == (5, True), damaged.stderr


def test_a_callers_key_lists_what_it_may_call(platform: Platform, tiny: str) -> None:
    made = platform.json("keys", "create", "--tenant", "callers", "--function", tiny)
    key = ("--api-key", made["key"])
    assert [row["name"] for row in platform.json("list", *key)] == [tiny]
    denied = platform.run("nodes", *key, check=False)
    assert denied.returncode == 3 and "lacks this right" in denied.stderr and "--api-key" not in denied.stderr
    assert "no function 'nosuch' yet" in platform.run("keys", "create", "--function", "nosuch").stderr
    states = {row["id"]: row["state"] for row in platform.json("keys", "list")}
    assert states[made["id"]] == "active"
    platform.run("keys", "revoke", made["id"])
    assert {row["id"]: row["state"] for row in platform.json("keys", "list")}[made["id"]] == "revoked"


def test_evict_counts_what_it_dropped(platform: Platform, tiny: str) -> None:
    platform.run("scale", tiny, "--instances", "1")
    kept = platform.run("evict", tiny, "--tier", "gpu").stderr
    assert "dropped 0 copies" in kept and "in use" in kept
    (node,) = {one["node"] for one in platform.instances(tiny)}
    assert platform.json("evict", tiny, "--tier", "gpu") == {
        "name": tiny,
        "tier": "gpu",
        "dropped": [],
        "kept": [node],
    }
    missing = platform.run("scale", tiny, "--instances", "2", "--on", "mars", check=False)
    assert (missing.returncode, "no node 'mars'" in missing.stderr) == (4, True)


def test_a_start_reports_its_steps(platform: Platform) -> None:
    assert platform.steps[0] == "starting Redis"
    assert re.fullmatch(r"starting \d nodes and 1 gateway", platform.steps[1])


def test_nothing_is_wider_than_the_terminal(platform: Platform, tiny: str) -> None:
    commands = (
        *(("list",), ("nodes",), ("describe", tiny), ("casts",), ("keys", "list"), ("prices", "list")),
        *(("usage", "report"), ("usage", "summary"), ("usage", "check"), ("gpu-time",), ("doctor",)),
    )
    for arguments in commands:
        done = run_cli(*arguments, env={**platform.env, "COLUMNS": "80"}, timeout_s=PATIENCE_S)
        wide = [line for line in done.stdout.splitlines() if len(line) > 80 and " " in line.strip()[81:]]
        assert done.stdout and not wide, (arguments, wide)


def test_processes_are_told_apart_by_their_titles(platform: Platform, tiny: str) -> None:
    def title(name: str) -> str:
        return " ".join(platform.process(name).cmdline()).strip()

    assert (title("gateway"), title("node-0")) == ("hypercast gateway-0", "hypercast node-0")
    assert title("zygote") == "hypercast zygote (invoker)"
    assert (
        " ".join(psutil.Process(platform.process("zygote").ppid()).cmdline()).strip()
        == "hypercast supervisor"
    )
