"""function.yaml: every setting is read, every slip is named."""

from pathlib import Path

import pytest

from registry.config.function_yaml import (
    FunctionSpec,
    load_function_yaml,
    parse_function_yaml,
    parse_handler_limits,
)
from registry.config.handler_spec import HandlerLimits, HandlerSpec
from registry.errors import InvalidRecord
from registry.records.function import FunctionTask, Scaling
from registry.records.live import LiveMode

FUNCTIONS = Path(__file__).resolve().parents[3] / "functions"

RESERVED = (
    *(
        "LD_PRELOAD",
        "LD_AUDIT",
        "GLIBC_TUNABLES",
        "GCONV_PATH",
        "OPENSSL_CONF",
        "PYTHONPATH",
        "PYTHONSTARTUP",
    ),
    *("MALLOC_ARENA_MAX", "PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE", "BASH_ENV"),
)

FULL = """
name: my-fn
description: What it does.
handler: code/handler.py:handle
env: {GREETING: hello, COUNT: 3}
limits: {memory: 512MiB, cpu: 90s, timeout: 2m, output: 1MiB, file_size: 0, open_files: 64, threads: 2,
         tasks: 64}
scaling: {min_instances: 1, max_instances: 4, target_concurrency: 2, keep_alive: 90s, host_keep_alive: 1h,
          live: pipeline, ttft_target: 2s}
"""


def test_every_setting_is_read() -> None:
    assert parse_function_yaml(FULL) == FunctionSpec(
        name="my-fn",
        description="What it does.",
        task=FunctionTask.HANDLER,
        handler=HandlerSpec(
            file="code/handler.py",
            function="handle",
            env={"GREETING": "hello", "COUNT": "3"},
            limits=HandlerLimits(
                memory_bytes=512 << 20,
                cpu_s=90,
                timeout_s=120,
                output_bytes=1 << 20,
                file_bytes=0,
                open_files=64,
                threads=2,
                tasks=64,
            ),
        ),
        scaling=Scaling(
            min_instances=1,
            max_instances=4,
            target_concurrency=2,
            keep_alive_s=90,
            host_keep_alive_s=3600,
            live=LiveMode.PIPELINE,
            ttft_target_s=2,
        ),
    )


def test_a_model_needs_nothing_else(tmp_path: Path) -> None:
    spec = parse_function_yaml(b"model: org/name")
    assert (spec.task, spec.dtype, spec.handler, spec.scaling) == (None, "auto", None, Scaling())
    assert spec.model_folder(tmp_path) is None
    (tmp_path / "checkpoint").mkdir()
    for text in ("./checkpoint", "checkpoint", str(tmp_path / "checkpoint")):
        spec = parse_function_yaml(f"model: {text}")
        assert spec.model_folder(tmp_path) == tmp_path / "checkpoint"
    assert parse_function_yaml("task: embed").model_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping, not empty"),
        ("- a", "must be a mapping, not list"),
        ("a: [", "not valid YAML"),
        ("description: nothing", "give a model, a task or a handler"),
        ("model: x\nmodle: y", "modle: unknown key"),
        ("model: x\nscaling: {min: 1}", r"scaling\.min: unknown key"),
        ("handler: h.py:f\nlimits: {ram: 1}", r"limits\.ram: unknown key"),
        ("model: x\nmodel: y", "model: given twice"),
        ("model: x\nname: Bad_Name", "invalid function name"),
        ("model: 3", "model: must be text"),
        ("model: x\ntask: sing", "task: 'sing' is not one of generate"),
        ("model: x\ntask: [embed]", "task: list is not one of"),
        ("model: x\ndtype: int4", "dtype"),
        ("model: x\nhandler: h.py:f", "either a model or a handler"),
        ("task: embed\nhandler: h.py:f", "the task 'handler', not 'embed'"),
        ("task: handler", "handler: missing"),
        ("handler: h.py", "FILE.py:FUNCTION"),
        ("handler: ../h.py:f", "inside the function's folder"),
        ("handler: /h.py:f", "inside the function's folder"),
        ("model: x\nenv: {A: b}", "env: only a function with a handler"),
        ("handler: h.py:f\nenv: {A-B: c}", "env.A-B"),
        *((f"handler: h.py:f\nenv: {{{name}: c}}", rf"env\.{name}: reserved") for name in RESERVED),
        ("handler: h.py:f\nenv: {A: true}", r"env\.A: must be text"),
        ("handler: h.py:f\nenv: {A: [1]}", r"env\.A: must be text"),
        ("handler: h.py:f\nlimits: {memory: 1}", r"limits\.memory must be"),
        ("handler: h.py:f\nlimits: {memory: lots}", r"limits\.memory"),
        ("handler: h.py:f\nlimits: {timeout: 3 fortnights}", r"limits\.timeout"),
        ("handler: h.py:f\nlimits: {timeout: -1}", r"limits\.timeout"),
        ("handler: h.py:f\nlimits: {timeout: .nan}", r"limits\.timeout"),
        ("handler: h.py:f\nlimits: {threads: 1.5}", r"limits\.threads: must be a whole number"),
        ("model: x\nscaling: {max_instances: 0}", "scaling: max_instances"),
        ("model: x\nscaling: [1]", "scaling: must be a mapping"),
        ("model: x\nscaling: {live: on}", "scaling.live: 'on' is not one of"),
        ("model: x\nscaling: {ttft_target: 2d}", "scaling: ttft_target must be"),
        ("model: x\n1: y", r"1: a key must be text \(line 2\)"),
        ("model: ' '", "model: must be text, not empty"),
        ("model: x\ndtype: 4", "dtype: 4 is not one of auto, float32"),
        ("model: x\nmodle: y", "known are description, dtype, engine, engine_args, env"),
        (
            "model: x\nscaling: {min_instances: 1.0}",
            r"scaling\.min_instances: must be a whole number, not 1\.0",
        ),
        ("handler: h.py:f\nlimits: {memory: true}", r"limits\.memory: True is not a number with a unit"),
        ("handler: h.py:f\nenv: [1]", "env: must be a mapping, not list"),
        ("model: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("model: x\ndescription: " + "y" * 70_000, "too large"),
    ],
)
def test_slips_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        parse_function_yaml(text)


def test_aliases_cannot_blow_up_the_message() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(InvalidRecord) as refused:
        parse_function_yaml("\n".join(lines))
    assert len(str(refused.value)) < 500


def test_the_files_name_stands_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecord, match=r"function\.yaml: cannot be read"):
        load_function_yaml(tmp_path)
    (tmp_path / "function.yaml").write_text("modle: x")
    with pytest.raises(InvalidRecord, match=r"function\.yaml: modle: unknown key"):
        load_function_yaml(tmp_path)


@pytest.mark.parametrize("name", ["echo", "embed", "classify"])
def test_the_repositorys_functions_are_valid(name: str) -> None:
    spec = load_function_yaml(FUNCTIONS / name)
    assert spec.name == name and spec.description
    assert (spec.task is FunctionTask.HANDLER) == (name == "echo")


def test_booleans_are_those_of_yaml_1_2() -> None:
    spec = parse_function_yaml("handler: h.py:f\nname: on\nenv: {A: off, B: yes}")
    assert spec.name == "on" and spec.handler is not None
    assert spec.handler.env == {"A": "off", "B": "yes"}


@pytest.mark.parametrize("text", ["off", "'off'"])
def test_live_may_be_off_without_quotes(text: str) -> None:
    assert parse_function_yaml(f"model: x\nscaling: {{live: {text}}}").scaling.live is LiveMode.OFF


def test_ceilings_are_read_over_their_defaults() -> None:
    ceilings = parse_handler_limits("memory: 2GiB, cpu: 1h", HandlerLimits(threads=7))
    assert ceilings == HandlerLimits(memory_bytes=2 << 30, cpu_s=3600, threads=7)
    assert parse_handler_limits("", ceilings) == ceilings
    for text, message in (
        ("ram: 1", r"limits\.ram: unknown"),
        ("memory: [", "not valid"),
        ("cpu: 0s", "cpu must"),
    ):
        with pytest.raises(InvalidRecord, match=message):
            parse_handler_limits(text, ceilings)


def test_a_limit_above_its_ceiling_is_named() -> None:
    assert HandlerLimits().excess(HandlerLimits()) == ""
    assert HandlerLimits(tasks=600).excess(HandlerLimits()) == "limits.tasks: 600 is above the ceiling of 512"
