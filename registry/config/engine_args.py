"""The arguments that a function may give its engine.

A tenant chooses what the engine computes, not what the node's machine does: arguments that name files, code,
addresses or other models are the platform's.
"""

import json
import math
import shlex
from collections.abc import Sequence
from itertools import pairwise

from registry.errors import InvalidRecord
from registry.records.engine import MAX_ARG_CHARS, MAX_ENGINE_ARGS

# Of vLLM's OpenAI server. Their values are checked by vLLM's own parser on a node.
VLLM_ARGS = frozenset(
    {
        "--block-size",
        "--default-chat-template-kwargs",
        "--dtype",
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill",
        "--enable-expert-parallel",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--kv-cache-dtype",
        "--kv-cache-memory-bytes",
        "--limit-mm-per-prompt",
        "--long-prefill-token-threshold",
        "--max-cpu-loras",
        "--max-logprobs",
        "--max-lora-rank",
        "--max-loras",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--num-gpu-blocks-override",
        "--override-generation-config",
        "--pipeline-parallel-size",
        "--quantization",
        "--reasoning-parser",
        "--return-tokens-as-token-ids",
        "--seed",
        "--structured-outputs-config",
        "--tensor-parallel-size",
        "--tool-call-parser",
    }
)
# Of options whose value is an object: what it may have.
_KEYS = {
    "--structured-outputs-config": frozenset(
        {"backend", "disable_any_whitespace", "disable_additional_properties", "disable_fallback"}
    )
}
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization"}
_NEGATED = "--no-"
_PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size")
MAX_PARALLEL = 64  # of each


def split_engine_args(text: str) -> tuple[str, ...]:
    """Split arguments as a shell does. Raises InvalidRecord."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidRecord(f"engine_args: {error}") from None


def check_vllm_args(args: Sequence[str]) -> tuple[str, ...]:
    """Return arguments with their long names. Raises InvalidRecord for one that a function may not give."""
    if len(args) > MAX_ENGINE_ARGS or any(len(arg) > MAX_ARG_CHARS for arg in args):
        raise InvalidRecord(
            f"engine_args: at most {MAX_ENGINE_ARGS} arguments of {MAX_ARG_CHARS} characters are allowed"
        )
    checked: list[str] = []
    for arg in args:
        if "\0" in arg:
            raise InvalidRecord("engine_args: an argument contains a NUL character")
        name, equals, value = arg.partition("=")
        if not _is_flag(name):
            if not checked:
                raise InvalidRecord(f"engine_args: {arg[:80]!r} is not an option: it must begin with --")
            checked.append(arg)
            continue
        name = _SHORT.get(name, name).replace("_", "-")
        plain = "--" + name.removeprefix(_NEGATED) if name.startswith(_NEGATED) else name
        if plain not in VLLM_ARGS:
            raise InvalidRecord(
                f"engine_args: {name[:80]} is not an option that a function may give vLLM; it may give "
                f"{', '.join(sorted(VLLM_ARGS))}"
            )
        checked.append(name + equals + value)
    for number, arg in enumerate(checked):
        name, equals, value = arg.partition("=")
        given = value if equals else "".join(checked[number + 1 : number + 2])
        if name in _KEYS:
            _check_keys(name, given)
        if name in _PARALLEL:
            _check_parallel(name, given)
    return tuple(checked)


def workers_of(args: Sequence[str]) -> int:
    """Return the number of processes that run the model by checked arguments: on GPUs, one each."""
    sizes: dict[str, int] = {}
    given = [part for arg in args for part in arg.split("=", 1)]
    for name, value in pairwise(given):
        if name in _PARALLEL and value.isdecimal():
            sizes[name] = max(1, int(value))  # the last one counts
    return math.prod(sizes.values())


def _check_parallel(name: str, value: str) -> None:
    """Raise InvalidRecord unless the value is plain digits: it decides how many accelerators are reserved."""
    if not (value.isascii() and value.isdecimal() and len(value) <= 4 and 1 <= int(value) <= MAX_PARALLEL):
        raise InvalidRecord(f"engine_args: {name} must be from 1 to {MAX_PARALLEL}, not {value[:80]!r}")


def _check_keys(name: str, value: str) -> None:
    """Raise InvalidRecord unless the value is an object that has what the option may have, and no more."""
    try:
        keys = set(json.loads(value))
    except (ValueError, TypeError):
        raise InvalidRecord(f"engine_args: {name} must be a JSON object") from None
    if unknown := sorted(map(str, keys - _KEYS[name])):
        raise InvalidRecord(
            f"engine_args: {name} may have {', '.join(sorted(_KEYS[name]))}, not {unknown[0][:80]!r}"
        )


def _is_flag(text: str) -> bool:
    """Return whether it is an option, not a value such as -1."""
    return text.startswith("-") and not text[1:].replace(".", "", 1).isdigit()
