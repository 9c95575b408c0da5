"""What a shell can give that no gateway takes: said in a line, before anything is sent."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.call_input import wrong_input
from cli.commands.deploy import default_name
from cli.errors import CliError, UsageError
from cli.group import cli
from cli.supervise.settings import settle
from gateway.core.errors import Unprocessable
from gateway.requests.task_inputs import require_input
from registry.config.options import Options
from registry.records.function import FunctionTask
from tests.fixtures.registry_records import draft

KEY = {"HYPERCAST_API_KEY": "hc_0123456789abcdef_secret", "HYPERCAST_URL": "http://127.0.0.1:1"}


def refused(*arguments: str, given: bytes | None = None, **environ: str) -> str:
    ended = CliRunner(env={**KEY, **environ}).invoke(cli, list(arguments), input=given)
    assert isinstance(ended.exception, CliError | SystemExit), ended.exception
    return ended.output if isinstance(ended.exception, SystemExit) else str(ended.exception)


@pytest.mark.parametrize("temperature", ["nan", "inf"])
def test_what_json_has_no_number_for_is_refused(temperature: str) -> None:
    assert "NaN and infinity" in refused("invoke", "f", "-p", "x", "-t", temperature)
    assert "NaN and infinity" in refused("invoke", "f", "-d", '{"a": NaN}')


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused("invoke", "f", "-d", f"@{tmp_path / 'body'}")
    assert "stdin is not UTF-8 text" in refused("invoke", "f", "-d", "-", given=b"\xff")
    assert "stdin is not UTF-8 text" in refused("invoke", "f", "-p", "-", given=b"\xff")
    assert "not UTF-8 text" in refused("invoke", "f", "-p", "\udcff")  # as Python takes such an argument


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e9", "soon"])
def test_a_time_to_wait_is_some_seconds(seconds: str) -> None:
    assert "bad number of seconds" in refused("invoke", "f", "-p", "x", "--timeout", seconds)
    assert "bad number of seconds" in refused("down", "--timeout", seconds)


def test_a_key_with_a_line_break_is_refused_and_not_shown() -> None:
    said = refused("list", HYPERCAST_API_KEY="hc_0123456789abcdef_secret\r")
    assert "line break" in said
    assert "secret" not in said


def test_a_folder_that_is_not_there_is_told_before_its_name_is_asked_for(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert refused("deploy", missing) == f"no such checkpoint folder: '{missing}'"
    assert refused("deploy", "") == "no such checkpoint folder: ''"
    assert "no config.json" in refused("deploy", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors" in refused("deploy", str(tmp_path))


def test_names_are_made_of_folders_and_hub_ids(tmp_path: Path) -> None:
    folder = tmp_path / "My_Model.v2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert default_name(str(folder)) == "my-model-v2"
    assert default_name("meta-llama/Llama-3.2-1B") == "llama-3-2-1b"
    with pytest.raises(UsageError, match="--name"):
        default_name("emulated:llama2-7b")


def test_files_that_are_no_certificates_are_named_before_anything_starts(tmp_path: Path) -> None:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text("no certificate")

    def checked(cert: str, key: str | None, ca: str | None) -> None:
        paths = [None if name is None else tmp_path / name for name in (cert, key, ca)]
        options = Options(cast_tls_cert=paths[0], cast_tls_key=paths[1], cast_tls_ca=paths[2])
        settle(options, gpus=0, cores=2)

    with pytest.raises(UsageError, match=f"{tmp_path}/cert, {tmp_path}/key and {tmp_path}/ca"):
        checked("cert", "key", "ca")
    with pytest.raises(UsageError, match="missing"):
        checked("missing", "key", "ca")
    with pytest.raises(UsageError, match="given together"):
        checked("cert", None, None)


@pytest.mark.parametrize("task", [task for task in FunctionTask if task is not FunctionTask.HANDLER])
def test_the_option_that_a_function_needs_is_named(task: FunctionTask) -> None:
    with pytest.raises(Unprocessable) as missing:
        require_input(draft("f", task=task), {"other": 1})
    shown = str(wrong_input(UsageError(missing.value.message)))
    assert re.match(r"f \w+ \w+: use --(prompt TEXT|input TEXT|image FILE)", shown)


def test_another_error_stays_as_the_gateway_says_it() -> None:
    other = UsageError("'max_tokens' must be 1 or more")
    assert wrong_input(other) is other
