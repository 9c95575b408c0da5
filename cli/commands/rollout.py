"""`rollout`: send a share of a function's requests to another version, then make it current or give it up."""

from collections.abc import Iterator
from typing import Any

import click

from cli.client import Client, segment
from cli.errors import DeployError, UsageError
from cli.options import DURATION, client_options, output_option, query, watch_option
from cli.output import emit_record
from cli.progress import note, waiting
from cli.refresh import Frame, watch_table
from cli.tables import fields
from cli.values import age_of, duration
from registry.config.option_types import Parsed
from registry.errors import InvalidRecord

ACTIONS = ("status", "promote", "abort")
_PAST = {"promote": "promoted", "abort": "aborted"}


def _steps(text: str) -> list[float]:
    try:
        return [float(one.strip().removesuffix("%")) for one in text.split(",")]
    except ValueError:
        raise InvalidRecord(f"bad steps {text!r}: use percentages such as 5,25,100") from None


STEPS = Parsed("steps", _steps)


@click.command("rollout")
@click.argument("name")
@click.argument("action", type=click.Choice(ACTIONS), required=False)
@click.option("--to", type=click.IntRange(1), metavar="VERSION", help="Version to roll out.")
@click.option("--percent", type=click.FloatRange(0, 100), help="Share of the requests that go to it.")
@click.option(
    "--shadow",
    "shadow_percent",
    type=click.FloatRange(0, 100),
    help="Share of the other requests of which it gets a copy, whose answer is discarded.  [default: 0]",
)
@click.option("--steps", type=STEPS, metavar="PERCENT,…", help="Shares that it gets one after the other.")
@click.option("--every", "step_s", type=DURATION, help="Time of each step.  [default: 5m]")
@click.option(
    "--max-error-rate",
    type=click.FloatRange(0, 1),
    help="Roll back if its rate of errors is higher by more than this.  [default: 0.05]",
)
@click.option(
    "--max-ttft-ratio",
    type=click.FloatRange(1, 1000),
    help="Roll back if its mean time to first token is more than this many times longer.  [default: 2]",
)
@click.option("--min-requests", type=click.IntRange(1), help="Judge it by no fewer.  [default: 5]")
@click.option(
    "--window", "window_s", type=DURATION, help="Judge it by requests of this time.  [default: 60s]"
)
@click.option("--wait", is_flag=True, help="Return once it has a ready instance; 5 if it was rolled back.")
@watch_option
@output_option
@client_options
def rollout_command(
    name: str, action: str | None, wait: bool, watch: bool, form: str, client: Client, **given: Any
) -> None:
    """Send a share of a function's requests to another version.

    The version is deployed with `hypercast deploy --no-traffic`, or an earlier one. Once it has a ready
    instance, --percent of the requests for NAME go to it; the id of a request decides. It is rolled back by
    itself if more of its requests fail than of the current version's, or if its first tokens take longer.
    With the same --to again, the share and the other settings of the rollout in progress change.

    Without options it shows the last rollout. `promote` makes the version current, `abort` gives it up; no
    request fails.

    \b
    Examples:
      hypercast deploy ./my-llama --name my-llama --no-traffic
      hypercast rollout my-llama --to 5 --percent 10
      hypercast rollout my-llama
      hypercast rollout my-llama promote
      hypercast rollout my-llama abort
      hypercast rollout my-llama --to 5 --steps 5,25,50,100 --every 10m
      hypercast rollout my-llama --to 5 --percent 0 --shadow 20
    """
    path = f"/admin/functions/{segment(name)}/rollout"
    body = query(**given)
    if body and (action or watch):
        raise UsageError(f"{action or '--watch'} has no options of a new rollout: leave them out")
    if wait and not body:
        raise UsageError("--wait is for a new rollout: name --to and --percent")
    if action in _PAST:
        shown = client.json("POST", f"{path}/{action}")
        note(f"{name}: version {shown['candidate']} {_PAST[action]}")
        if form in ("json", "csv"):
            emit_record(shown, form)
        return
    if body:
        begin(client, name, body, form, wait=wait)
    elif watch:
        watch_table(client, ("functions", "traffic"), lambda: Frame(text=_text(client.json("GET", path))))
    else:
        shown = client.json("GET", path)
        emit_record(shown, form, list(described(shown)))


def begin(client: Client, name: str, body: dict[str, Any], form: str, *, wait: bool) -> None:
    """Begin a rollout, or change the one in progress. Raises DeployError if it was rolled back meanwhile."""
    if "to" not in body:
        raise UsageError("name the version with --to")
    if not body.keys() & {"percent", "steps", "shadow_percent"}:
        raise UsageError("name a share with --percent, --steps or --shadow")
    path = f"/admin/functions/{segment(name)}/rollout"
    if wait:
        with waiting(f"waiting for an instance of version {body['to']}"):
            shown = client.json("POST", path, json={**body, "wait": True})
    else:
        shown = client.json("POST", path, json=body)
    if wait:
        check_goes_on(shown)
    emit_record(shown, form, list(described(shown)))


def check_goes_on(shown: dict[str, Any]) -> None:
    """Raise DeployError for a rollout that was given up."""
    if shown["state"] in ("rolled_back", "aborted"):
        raise DeployError(f"version {shown['candidate']} of {shown['name']} was given up: {shown['reason']}")


def described(shown: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the labelled values of a rollout."""
    state = shown["state"].replace("_", " ")
    yield "Name", shown["name"]
    yield "State", f"{state} since {age_of(shown['since'])}"
    if shown["reason"]:
        yield "Reason", shown["reason"]
    yield "Versions", f"{shown['candidate']} beside {shown['stable']}"
    yield "Share", _share(shown)
    if shown["steps"]:
        steps = ", ".join(f"{step:g} %" for step in shown["steps"])
        yield "Steps", f"{steps}, each for {duration(shown['step_s'])}"
    limits = shown["limits"]
    yield (
        "Rolled back",
        f"at {limits['max_error_rate'] * 100:g} % more errors, or {limits['max_ttft_ratio']:g} times "
        f"the time to first token, over {duration(limits['window_s'])}",
    )
    if shown["traffic"]:
        yield "Ready", f"{shown['ready']} instance{'' if shown['ready'] == 1 else 's'}"
    for one in shown["traffic"]:
        ttft = "" if one["ttft_ms"] is None else f", first token after {one['ttft_ms']:.0f} ms"
        yield f"Version {one['version']}", f"{one['errors']} of {one['ended']} failed{ttft}"


def _share(shown: dict[str, Any]) -> str:
    text = f"{shown['percent']:g} % of the requests"
    return text + (f", copies of {shown['shadow_percent']:g} %" if shown["shadow_percent"] else "")


def _text(shown: dict[str, Any]) -> str:
    return fields(list(described(shown)))
