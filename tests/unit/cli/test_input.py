"""What a shell can give that no gateway takes: said in a line, before anything is sent."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.commands import cli
from cli.errors import CliError, UsageError
from cli.up_settings import tls_files

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
    assert "--name" in refused("deploy", str(tmp_path))


def test_files_that_are_no_certificates_are_named_before_anything_starts(tmp_path: Path) -> None:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text("no certificate")
    with pytest.raises(UsageError, match=f"{tmp_path}/cert, {tmp_path}/key and {tmp_path}/ca"):
        tls_files(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    with pytest.raises(UsageError, match="missing"):
        tls_files(tmp_path / "missing", tmp_path / "key", tmp_path / "ca")
    with pytest.raises(UsageError, match="belong together"):
        tls_files(tmp_path / "cert", None, None)
