"""Options and value types that several commands share."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.client import Client
from cli.completion import context_names, function_names
from cli.errors import UsageError
from cli.output import FORMATS, REPORT_FORMATS
from cli.settings import resolve
from registry.config.option_types import DURATION as DURATION
from registry.config.option_types import RATE as RATE
from registry.config.option_types import SIZE as SIZE
from registry.config.option_types import Parsed
from registry.config.options import default_data_dir
from registry.errors import InvalidRecord
from registry.records.function import ScaleDown, ScalingMode, ServingMode, check_name
from registry.records.live import LiveMode
from registry.units.moments import parse_moment

_MAX_SECONDS = 2e6  # sockets accept no timeout over 24 days

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_SECONDS:
        raise InvalidRecord(f"bad number of seconds {text!r}: use a number above 0, such as 30 or 0.5")
    return seconds


MOMENT = Parsed("time", lambda text: parse_moment(text, time.time()))
NAME = Parsed("name", check_name)
SECONDS = Parsed("seconds", _seconds)
LIVE = click.Choice([live.value for live in LiveMode])


def scaling_options(command: F) -> F:
    """Add the settings of scaling that both `deploy` and `scale` change."""
    options = (
        click.option(
            "--scaling",
            "policy",
            type=click.Choice([mode.value for mode in ScalingMode]),
            help="Scale by concurrent requests, or by the load: prompts that wait, step times, KV cache.  "
            "[default: load for models that generate, unless --target-concurrency is given]",
        ),
        click.option(
            "--scale-down",
            type=click.Choice([mode.value for mode in ScaleDown]),
            help="When --scaling load stops an instance that is not needed: after as long as a further start "
            "would take, or after --scale-down-delay.  [default: start, or delay where that is given]",
        ),
        click.option(
            "--scale-down-delay",
            "scale_down_delay_s",
            type=DURATION,
            help="How long --scale-down delay keeps an instance that is not needed.",
        ),
        click.option(
            "--ttft-target",
            "ttft_target_s",
            type=DURATION,
            help="Target time to first token for --scaling load and --live auto.  [default: 1s]",
        ),
        click.option(
            "--tbt-target",
            "tbt_target_s",
            type=DURATION,
            help="Target time between tokens for --scaling load.  [default: 200ms]",
        ),
        click.option(
            "--serving",
            type=click.Choice([mode.value for mode in ServingMode]),
            help="Run prompts and continue them on the same instances, or on different ones, with --scaling "
            "load.  [default: colocated]",
        ),
        click.option(
            "--live", type=LIVE, help="Serve requests while the model is still loading.  [default: auto]"
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def client_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add `--url`, `--api-key`, `--ca` and `--context`; the command receives a `client` of that gateway."""

    @functools.wraps(command)
    def connected(
        url: str | None, api_key: str | None, ca_file: Path | None, context: str | None, **values: Any
    ) -> T:
        with connect(url, api_key, ca_file, context) as client:
            return command(client=client, **values)

    connected = click.option(
        "--context",
        metavar="NAME",
        shell_complete=context_names,
        help="Gateway of `hypercast login`.  [env: HYPERCAST_CONTEXT]",
    )(connected)

    help = "Authority of an https:// gateway's certificate.  [env: HYPERCAST_CA_FILE]"
    connected = click.option("--ca", "ca_file", type=click.Path(path_type=Path), help=help)(connected)
    with_key = click.option("--api-key", help="API key.  [env: HYPERCAST_API_KEY]")(connected)
    return click.option("--url", help="Address of the gateway.  [env: HYPERCAST_URL]")(with_key)


def output_option(command: F) -> F:
    """Add `-o` with the formats of `emit_rows` and `emit_record`."""
    return _output_option(FORMATS)(command)


def text_option(json_help: str) -> Callable[[F], F]:
    """Add `-o` for commands that print text, or JSON, which `json_help` describes."""
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help=f"json: {json_help}.",
    )


def watch_option(command: F) -> F:
    """Add `--watch`; where it is given, refuse the formats of programs."""

    @functools.wraps(command)
    def checked(*, watch: bool, form: str, **values: Any) -> Any:
        if watch and form in ("json", "csv"):
            raise UsageError("--watch shows tables: leave out -o")
        return command(watch=watch, form=form, **values)

    help = "Show it again when it changes, at most every second, until Ctrl-C."
    return click.option("-w", "--watch", is_flag=True, help=help)(checked)  # type: ignore[return-value]


def report_output_options(command: F) -> F:
    """Add `-o` with Parquet, and `--file`."""
    command = click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write to this file instead of stdout.",
    )(command)
    return _output_option(REPORT_FORMATS)(command)


def _output_option(forms: tuple[str, ...]) -> Callable[[F], F]:
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(forms),
        metavar="FORMAT",
        default="table",
        help=f"Output format: {', '.join(forms)}.  [default: table]",
    )


def data_dir_option(command: F) -> F:
    """Add `--data-dir` to a command that works on the directory of an `up`."""
    return click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        default=default_data_dir,
        help="Data directory of `hypercast up`.  [default: ~/.local/share/hypercast]",
    )(command)


def period_options(command: F) -> F:
    """Add `--since`, `--until`, `--function` and `--tenant`."""
    command = click.option("--tenant", help="Only this tenant.")(command)
    command = click.option("--function", shell_complete=function_names, help="Only this function.")(command)
    return time_options(command)


def time_options(command: F) -> F:
    """Add `--since` and `--until`."""
    command = click.option("--until", type=MOMENT, help="End of the period (exclusive).")(command)
    return click.option(
        "--since",
        type=MOMENT,
        help="Start of the period: 24h (ago), or a UTC time such as 2026-11-21T08:00Z.",
    )(command)


def query(**values: object) -> dict[str, object]:
    """Return the values that are set, as query parameters."""
    return {name: value for name, value in values.items() if value is not None}


def connect(
    url: str | None, api_key: str | None, ca_file: Path | None = None, context: str | None = None
) -> Client:
    """Return a client of the gateway chosen by flags, environment or configuration file."""
    return Client(resolve(url, api_key, ca_file=ca_file, context=context))
