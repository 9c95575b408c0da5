"""Checks arguments and an architecture with vLLM itself: run by vLLM's own interpreter, by path.

It reads `{"arguments": [...], "architectures": [...]}` on its standard input, and prints `{"error": "..."}`,
with "" if vLLM takes them. It imports nothing of ours.
"""

import contextlib
import io
import json
import sys


def main() -> None:
    """Check one request."""
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        error = check(request)
    print(json.dumps({"error": error}))


def check(request: dict[str, list[str]]) -> str:
    """Return what vLLM has against a request, "" for nothing."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    parser, said = make_arg_parser(FlexibleArgumentParser()), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            validate_parsed_serve_args(parser.parse_args(request["arguments"]))
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2] or "vLLM refuses these arguments"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    known = set(ModelRegistry.get_supported_archs())
    names = request["architectures"]
    if names and not known & set(names):
        return f"vLLM supports no architecture {names[0]!r}"
    return ""


if __name__ == "__main__":
    main()
