"""`set`: settings as they are written, and examples."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.processes import ROOT
from cli.commands.dev import watched_folders
from cli.commands.set_function import changed, parsed
from cli.errors import MissingError, UsageError
from cli.examples import example_folder, examples
from registry.config.function_yaml import scaling_keys
from tests.fixtures.patience import PATIENCE_S


def test_settings_are_written_as_in_function_yaml() -> None:
    assert parsed(["keep-alive=5m", "min_instances=1", "max-instances=all", "live=off"]) == {
        "keep_alive_s": 300.0,
        "min_instances": 1,
        "max_instances": None,
        "live": "off",
    }
    assert parsed(["ttft-target=500ms", "policy=load", "host-copies=0", "scale-down=start"]) == {
        "ttft_target_s": 0.5,
        "policy": "load",
        "host_copies": 0,
        "scale_down": "start",
    }
    assert len(scaling_keys()) == 13


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["keep-alive"], "not SETTING=VALUE"),
        (["keep-alive="], "not SETTING=VALUE"),
        (["keepalive=5m"], "no setting 'keepalive'; settings: min-instances, "),
        (["keep-alive=5m", "keep_alive=6m"], "given twice"),
        (["keep-alive=soon"], "keep_alive: .*soon"),
        (["keep-alive=[1]"], "keep_alive"),
        (["min-instances=one"], "min_instances: must be a whole number"),
        (["min-instances=null"], "no value"),
        (["live=sometimes"], "live: 'sometimes' is not one of"),
        (["keep-alive=5m: 6"], "keep_alive"),
    ],
)
def test_a_wrong_setting_is_named(given: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parsed(given)


def test_changes_are_shown_with_what_was() -> None:
    before = {"keep_alive_s": 60.0, "max_instances": 3, "live": "auto"}
    after = {"keep_alive_s": 300.0, "max_instances": None, "live": "auto"}
    assert changed("f", dict.fromkeys(before), before, after) == [
        "f: keep-alive 5m (was 1m)",
        "f: max-instances all (was 3)",
        "f: live auto",
    ]


def test_examples_are_found_by_name() -> None:
    found = {one.name: one for one in examples()}
    assert set(found) == {"classify", "echo", "embed", "tiny-coder"}
    assert found["tiny-coder"].needs == "" and "--model" in found["embed"].needs
    assert "--allow-handlers" in found["echo"].needs
    assert example_folder("example:echo") == str(ROOT / "functions" / "echo")
    assert example_folder("./echo") == "./echo"
    for wrong in ("example:nosuch", "example:../gateway", "example:", "example:*"):
        with pytest.raises(MissingError, match="examples: classify, echo, embed, tiny-coder"):
            example_folder(wrong)


def test_programs_are_not_taken_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("raise RuntimeError('of the user')")
    show = "from cli.interpreter import module_command; print('-P' in module_command('cli'))"
    for flags, expected in ((["-P"], "True"), ([], "False")):
        done = subprocess.run(
            [sys.executable, *flags, "-c", show],
            cwd=tmp_path if flags else ROOT,
            env={"PYTHONPATH": str(ROOT)} if flags else {},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert done.stdout.strip() == expected


def test_a_checkpoint_outside_of_the_folder_is_watched_too(tmp_path: Path) -> None:
    folder, inside, outside = tmp_path / "f", tmp_path / "f" / "model", tmp_path / "model"
    for made in (inside, outside):
        made.mkdir(parents=True)
    assert watched_folders(folder, None) == [folder]
    assert watched_folders(folder, str(outside)) == [folder, outside]
    (folder / "function.yaml").write_text("name: f\nmodel: ./model\n")
    assert watched_folders(folder, None) == [folder]
    (folder / "function.yaml").write_text(f"name: f\nmodel: {outside}\n")
    assert watched_folders(folder, None) == [folder, outside]
