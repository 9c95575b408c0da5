"""How `rollout` shows a rollout, and which options it refuses before it asks a gateway."""

import time
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cli.commands.deploy import added
from cli.commands.functions import rolled_out
from cli.commands.rollout import check_goes_on, described
from cli.errors import DeployError, UsageError
from cli.group import cli
from gateway.schemas.answers import RolloutTraffic, RolloutView
from registry.records.rollout import Rollout, RolloutLimits, RolloutPlan, RolloutState


def shown(state: RolloutState = RolloutState.RUNNING, **changes: Any) -> dict[str, Any]:
    view = RolloutView(
        name="tiny",
        id="r",
        state=state,
        candidate=5,
        stable=4,
        percent=10,
        shadow_percent=20,
        steps=(10, 100),
        step_s=600,
        limits=RolloutLimits(),
        started_at=time.time(),
        since=time.time(),
        reason="",
        ready=1,
        traffic=(
            RolloutTraffic(version=5, requests=9, ended=8, errors=2, ttft_ms=184.2),
            RolloutTraffic(version=4, requests=90, ended=90, errors=0, ttft_ms=None),
        ),
    )
    found: dict[str, Any] = msgspec.to_builtins(view) | changes
    return found


def test_a_rollout_is_shown_with_what_it_is_judged_by() -> None:
    fields = dict(described(shown()))
    assert fields["State"].startswith("running since ")
    assert fields["Share"] == "10 % of the requests, copies of 20 %"
    assert fields["Steps"] == "10 %, 100 %, each for 10m"
    assert fields["Version 5"] == "2 of 8 failed, first token after 184 ms"
    assert fields["Version 4"] == "0 of 90 failed"


def test_one_that_was_given_up_is_a_failed_deploy() -> None:
    check_goes_on(shown())
    with pytest.raises(DeployError, match="version 5 of tiny was given up: it is bad"):
        check_goes_on(shown(RolloutState.ROLLED_BACK, reason="it is bad"))


def test_describe_has_the_last_one_in_a_line() -> None:
    plan = RolloutPlan(candidate=5, percent=12.5)
    now = time.time()
    one = Rollout(id="r", stable=4, plan=plan, started_at=now, since=now)
    running = rolled_out(msgspec.to_builtins(one))
    assert running.startswith("version 5 starting since ") and running.endswith(", 12.5 % of the requests")
    over = msgspec.to_builtins(one) | {"state": "rolled_back", "reason": "it is bad"}
    assert rolled_out(over).startswith("version 5 rolled back since ") and rolled_out(over).endswith(
        ": it is bad"
    )
    assert rolled_out(None) == ""


def test_a_version_without_traffic_leaves_the_one_before() -> None:
    made = {"name": "tiny", "version": 5, "previous_version": 4}
    assert added(made) == "tiny: version 5 added (version 4 stays current)"
    assert added({"name": "tiny", "version": 1}) == "tiny: version 1 (new)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--percent", "10"), "name the version with --to"),
        (("--to", "5"), "name a share"),
        (("promote", "--to", "5"), "promote has no options of a new rollout"),
        (("--watch", "--percent", "5"), "--watch has no options of a new rollout"),
        (("--wait",), "--wait is for a new rollout"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], words: str) -> None:
    command = ["rollout", "tiny", *arguments, "--url", "http://127.0.0.1:9", "--api-key", "k"]
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, UsageError) and words in str(result.exception)
