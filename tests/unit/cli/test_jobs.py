"""Jobs on the command line: sent, listed, waited for, cancelled, and their results."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from cli.errors import CliError, MissingError, TimeoutExceeded
from cli.group import cli
from cli.jobs import runs_on, state_of
from gateway.core.contract import Event, FunctionCall
from gateway.core.settings import JobSettings
from registry.messages.node import InvokeHandler
from registry.records.function import FunctionTask
from tests.fixtures.gateway_http import byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S
from tests.http.test_batches import jsonl, line
from tests.http.test_predictions import Held, echo


@dataclass(frozen=True)
class Scene:
    """A gateway, and commands with the key of a caller."""

    env: dict[str, str]

    async def __call__(self, *arguments: str) -> Result:
        ended = await asyncio.to_thread(CliRunner(env=self.env).invoke, cli, list(arguments))
        assert isinstance(ended.exception, CliError | SystemExit | None), ended.exception
        return ended


@asynccontextmanager
async def scene(script: Any = echo, **jobs: Any) -> AsyncIterator[Scene]:
    """Yield a gateway whose functions are `echo` and `coder`."""
    async with gateway(jobs=JobSettings(**jobs)) as gw:
        await gw.add_function("echo", FunctionTask.HANDLER)
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        generated = gw.dispatcher.script

        async def either(call: FunctionCall) -> AsyncIterator[Event]:
            async for event in (script if isinstance(call.work, InvokeHandler) else generated)(call):
                yield event

        gw.dispatcher.script = either

        yield Scene({"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.caller_key})


async def test_a_call_is_queued_waited_for_and_its_result_printed() -> None:
    async with scene() as run:
        queued = await run("predict", "echo", "-d", '{"n": 1}')
        job_id = queued.stdout.strip()
        waited = await run("jobs", "wait", job_id, "-o", "json")
        assert json.loads(waited.stdout)["status"] == "succeeded"
        assert json.loads((await run("jobs", "result", job_id)).stdout) == {"n": 1}
        assert "succeeded" in (await run("jobs", "show", job_id)).stdout
        done = await run("predict", "coder", "-p", "hello", "-n", "2", "--wait")
        assert done.stdout.strip()
        cancelled = await run("jobs", "cancel", job_id)
        assert f"{job_id}: succeeded" in cancelled.stderr  # it had ended


async def test_the_same_id_is_the_same_prediction() -> None:
    async with scene() as run:
        named = ("--id", "order-1", "-o", "json")
        first = json.loads((await run("predict", "echo", "-d", "{}", *named)).stdout)
        again = json.loads((await run("predict", "echo", "-d", "{}", *named)).stdout)
        assert first["request_id"] == again["request_id"] and first["id"] == "order-1"
        other = await run("predict", "echo", "-d", '{"n": 2}', *named)
        assert "with another model or input" in str(other.exception)


async def test_a_file_of_calls_is_uploaded_run_and_its_results_written(tmp_path: Path) -> None:
    calls = tmp_path / "calls.jsonl"
    bad = line("2") | {"body": {"model": "nothing", "prompt": "x"}}
    calls.write_bytes(jsonl(line("1"), bad))
    async with scene() as run:
        ended = await run("batch", str(calls), "--result", str(tmp_path / "out.jsonl"))
        assert ended.exception is None and "2 of 2 ended, 1 failed" in ended.stdout
        (good,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        (failed,) = map(json.loads, (tmp_path / "out.jsonl.errors").read_text().splitlines())
        assert (good["custom_id"], failed["custom_id"]) == ("1", "2")
        (row,) = json.loads((await run("jobs", "list", "-o", "json")).stdout)
        assert (row["kind"], row["status"], row["done"], row["failed"]) == ("batch", "completed", 2, 1)
        errors = await run("jobs", "result", row["id"], "--errors")
        assert json.loads(errors.stdout)["custom_id"] == "2"


async def test_what_does_not_end_well_is_an_error_with_its_reason(tmp_path: Path) -> None:
    calls = tmp_path / "calls.jsonl"
    calls.write_bytes(jsonl(line("1"), line("1")))
    async with scene() as run:
        refused = await run("batch", str(calls), "--wait")
        assert "failed" in refused.stdout and "line 2: '1' repeats" in str(refused.exception)
        missing = await run("batch", str(tmp_path / "missing"))
        assert isinstance(missing.exception, MissingError)
        calls.write_text("nothing\n")
        assert 'no "url"' in str((await run("batch", str(calls))).exception)
        job = (await run("predict", "coder", "-d", '{"prompt": 5}')).stdout.strip()
        failed = await run("jobs", "wait", job)
        assert f"{job} failed: " in str(failed.exception)
        assert "prompt" in str((await run("jobs", "result", job)).exception)
        unknown = await run("jobs", "show", "nothing")
        assert "no prediction 'nothing'" in str(unknown.exception)


async def test_a_wait_has_an_end_and_what_was_waited_for_runs_on() -> None:
    held = Held()
    async with scene(held) as run:
        job = (await run("predict", "echo", "-d", "{}")).stdout.strip()
        late = await run("jobs", "wait", job, "--timeout", "0.1")
        assert isinstance(late.exception, TimeoutExceeded)
        assert f"hypercast jobs show {job}" in late.stderr
        assert "has not ended" in str((await run("jobs", "result", job)).exception)
        assert "being cancelled" in (await run("jobs", "cancel", job)).stderr
        async with asyncio.timeout(PATIENCE_S):
            assert "canceled" in str((await run("jobs", "wait", job)).exception)


def test_an_interrupted_wait_leaves_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), runs_on("order-1"):
        raise KeyboardInterrupt
    assert "order-1 runs on. See it with: hypercast jobs show order-1" in capsys.readouterr().err


async def test_rows_are_the_same_in_csv_and_json_and_fit_a_terminal() -> None:
    async with scene() as run:
        for name in ("a" * 60, "b"):
            await run("predict", "echo", "-d", "{}", "--id", name, "--wait")
        found = json.loads((await run("jobs", "list", "-o", "json")).stdout)
        rows = list(csv.DictReader(io.StringIO((await run("jobs", "list", "-o", "csv")).stdout)))
        assert [row["id"] for row in rows] == [one["id"] for one in found] == ["b", "a" * 60]
        assert set(rows[0]) == set(found[0])
        assert json.loads((await run("jobs", "list", "--limit", "1", "-o", "json")).stdout) == found[:1]


async def test_ids_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as run:
        await run("predict", "echo", "-d", "{}", "--id", "order-1", "--wait")
        for name, value in run.env.items():
            monkeypatch.setenv(name, value)
        completion = ShellComplete(cli, {}, "hypercast", "_HYPERCAST_COMPLETE")
        found = await asyncio.to_thread(completion.get_completions, ["jobs", "show"], "or")
        assert [one.value for one in found] == ["order-1"]


def test_a_batch_is_described_by_its_calls() -> None:
    batch = {"id": "batch_" + "0" * 24, "status": "in_progress"}
    counts = {"total": 9, "completed": 3, "failed": 1}
    assert state_of({**batch, "request_counts": counts}) == "in progress, 4 of 9 ended, 1 failed"
