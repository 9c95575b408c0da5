"""Which arguments a function may give its engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.config.engine_args import VLLM_ARGS, check_vllm_args, split_engine_args, workers_of
from registry.config.function_yaml import parse_function_yaml
from registry.errors import InvalidRecord
from registry.records.engine import MAX_ENGINE_ARGS, EngineKind


def test_arguments_as_on_a_command_line() -> None:
    args = split_engine_args("--max-model-len 4096 --override-generation-config '{\"top_k\": 5}' -tp 2")
    assert check_vllm_args(args) == (
        *("--max-model-len", "4096", "--override-generation-config", '{"top_k": 5}'),
        *("--tensor-parallel-size", "2"),
    )
    assert check_vllm_args(["--no-enable-prefix-caching", "--seed", "-1"])[0] == "--no-enable-prefix-caching"
    assert check_vllm_args(["--max_model_len=512"]) == ("--max-model-len=512",)
    compact = ("--structured-outputs-config", '{"disable_any_whitespace": true}')
    assert check_vllm_args(compact) == compact


@pytest.mark.parametrize(
    "args",
    [
        ["--trust-remote-code"],
        ["--trust_remote_code"],
        ["--allowed-local-media-path", "/"],
        ["--model=/etc"],
        ["--load-format", "pt"],
        ["--middleware", "os.system"],
        ["--lora-modules", "x=/etc"],
        ["--chat-template", "/etc/passwd"],
        ["--hf-overrides", "{}"],
        ["--uds", "/tmp/x"],
        ["--api-key", "x"],
        ["--no-trust-remote-code"],
        ["-O3"],
        ["--seed", "1\0"],
        ["--structured-outputs-config", '{"reasoning_parser_plugin": "/x.py"}'],
        ["--structured-outputs-config=3"],
        ["--structured-outputs-config"],
        ["--tensor-parallel-size", "+2"],
        ["--tensor-parallel-size=0"],
        ["--tensor_parallel_size", "-1"],
        ["-tp", "2_0"],
        ["-pp=\u0662"],
        ["-pp", "65"],
        ["--pipeline-parallel-size"],
        ["4096"],
    ],
)
def test_what_reaches_beyond_the_model_is_refused(args: list[str]) -> None:
    with pytest.raises(InvalidRecord, match="engine_args"):
        check_vllm_args(args)


def test_there_are_not_too_many() -> None:
    with pytest.raises(InvalidRecord, match="at most"):
        check_vllm_args(["--seed"] * (MAX_ENGINE_ARGS + 1))
    with pytest.raises(InvalidRecord, match="at most"):
        check_vllm_args(["--seed", "1" * 5000])
    with pytest.raises(InvalidRecord, match="engine_args"):
        split_engine_args("--seed '")


@pytest.mark.parametrize(
    ("args", "workers"),
    [
        ([], 1),
        (["--max-model-len", "8"], 1),
        (["-tp", "4"], 4),
        (["--tensor_parallel_size=2", "--seed", "3", "-pp", "4"], 8),
        (["-tp=8", "--tensor-parallel-size", "2"], 2),  # the last one counts, as in vLLM
        (["-tp", "2", "-tp", "008"], 8),
    ],
)
def test_a_model_is_divided_among_processes(args: list[str], workers: int) -> None:
    assert workers_of(check_vllm_args(args)) == workers


# The values of the others are checked, too.
CHECKED = {"--structured-outputs-config", "--tensor-parallel-size", "--pipeline-parallel-size"}
FLAGS = st.sampled_from(sorted(VLLM_ARGS - CHECKED))
VALUES = st.sampled_from(["1", "-1", "-0.5", "auto", "a_b", "{}", "/etc", ""])


@st.composite
def options(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Draw an allowed option in one of its spellings, and the same as vLLM names it."""
    flag, value = draw(FLAGS), draw(VALUES)
    name = draw(st.sampled_from([flag, f"--no-{flag[2:]}"]))
    spelt = draw(st.sampled_from([name, f"--{name[2:].replace('-', '_')}"]))
    if draw(st.booleans()):
        return [f"{spelt}={value}"], [f"{name}={value}"]
    return [spelt, value], [name, value]


@given(st.lists(options(), max_size=8))
def test_allowed_options_pass_in_every_spelling(drawn: list[tuple[list[str], list[str]]]) -> None:
    given_args = [arg for spelt, _ in drawn for arg in spelt]
    assert check_vllm_args(given_args) == tuple(arg for _, named in drawn for arg in named)


@given(st.lists(options(), max_size=3), FLAGS, st.integers(2, 9), st.text("abc.", min_size=1, max_size=9))
def test_no_option_passes_that_is_nearly_an_allowed_one(
    drawn: list[tuple[list[str], list[str]]], flag: str, cut: int, more: str
) -> None:
    before = [arg for spelt, _ in drawn for arg in spelt]
    for near in (flag[:cut] + more + flag[cut:], flag[:-1], flag[1:], f"--no-no-{flag[2:]}"):
        for args in ([*before, near], [near, *before], [*before, f"{near}=1"]):
            with pytest.raises(InvalidRecord, match="not an option"):
                check_vllm_args(args)


def test_function_yaml_names_the_engine() -> None:
    spec = parse_function_yaml("model: ./m\nengine: vllm\nengine_args: --max-model-len 64\n")
    assert (spec.engine, spec.engine_args) == (EngineKind.VLLM, ("--max-model-len", "64"))
    assert parse_function_yaml("model: ./m\nengine: vllm\nengine_args: [--seed, '3']\n").engine_args == (
        "--seed",
        "3",
    )
    assert parse_function_yaml("model: ./m\n").engine is None
    for text, words in (
        ("model: ./m\nengine: sglang\n", "engine: 'sglang' is not one of native, vllm"),
        ("model: ./m\nengine_args: --seed 3\n", "only a function with the engine vllm"),
        ("model: ./m\nengine: native\nengine_args: --seed 3\n", "only a function with the engine vllm"),
        ("handler: h.py:f\nengine: vllm\n", "a function with a handler has none"),
        (
            "model: ./m\nengine: vllm\nengine_args: --trust-remote-code\n",
            "not an option that a function may give",
        ),
    ):
        with pytest.raises(InvalidRecord, match=words):
            parse_function_yaml(text)
