"""The pure parts of the command line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.backoff import LONGEST_S, YOUNG_S, Backoff
from cli.errors import UsageError
from cli.output import render
from cli.settings import resolve
from cli.supervisor import invoker_arguments
from cli.up_settings import UpSettings, settle


def settings(**changes: object) -> UpSettings:
    values: dict[str, object] = {
        "nodes": None,
        "hosts": None,
        "host": "127.0.0.1",
        "port": 0,
        "data_dir": Path("/tmp/x"),
        "device": "auto",
        "redis_url": None,
        "link_rate": None,
        "gpu_memory": None,
        "host_memory": None,
        "allow_handlers": False,
        "meter_interval": None,
        "gateways": 1,
        "appendfsync": "everysec",
        "gpus": 0,
        "cores": 2,
    }
    return settle(**{**values, **changes})  # type: ignore[arg-type]


def test_nodes_default_to_the_gpus_else_two() -> None:
    assert (settings().nodes, settings().device) == (2, "cpu")
    assert (settings(gpus=4).nodes, settings(gpus=4).devices[3]) == (4, "cuda:3")
    assert settings(nodes=3, hosts=2).host_ids == ("host-0", "host-1", "host-0")
    assert settings(nodes=3).host_ids == (None, None, None)


def test_a_link_rate_implies_a_host_for_each_node() -> None:
    assert settings(nodes=3, link_rate="1mbit").hosts == 3


def test_emulated_nodes_have_the_links_of_their_datasheet() -> None:
    found = settings(device="emulated:h800/1000/10", nodes=3)
    assert (found.link_rate, found.hosts) == ("5000000B/s", 3)
    assert found.devices == ("emulated:h800/1000/10",) * 3
    assert settings(device="emulated:h800/1000", link_rate="1mbit").link_rate == "1mbit"


def test_nodes_hear_what_they_are_to_do_with_kv() -> None:
    told = invoker_arguments(settings(kv_moves="never"), "redis://", Path("secret"))
    assert all(flags[flags.index("--kv-moves") + 1] == "never" for flags in told.values())
    assert not any("--kv-moves" in flags for flags in invoker_arguments(settings(), "", Path()).values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "emulated:h100"}, "there are h800"),
        ({"device": "emulated:h800/0"}, "emulated:GPU"),
        ({"nodes": 0}, "--nodes"),
        ({"nodes": 2, "hosts": 3}, "--hosts"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda"}, "no NVIDIA GPU"),
        ({"device": "cuda", "gpus": 1, "nodes": 2}, "more than the 1 GPUs"),
        ({"nodes": 2, "hosts": 1, "link_rate": "1mbit"}, "--link-rate"),
        ({"shm_dir": Path("/proc/nowhere")}, "--shm-dir /proc/nowhere"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings(**changes)


@given(st.lists(st.tuples(st.floats(0, 2 * YOUNG_S), st.booleans()), max_size=40))
def test_backoff_is_bounded_and_forgets_after_a_stable_run(lives: list[tuple[float, bool]]) -> None:
    backoff = Backoff()
    for lived_s, killed in lives:
        backoff = backoff.after(lived_s, killed=killed)
        assert 0 < backoff.wait_s <= (0.4 if killed else LONGEST_S)
        if lived_s >= YOUNG_S:
            assert backoff == Backoff(1)


def test_only_deaths_of_ones_own_make_the_pauses_long() -> None:
    killed = crashed = Backoff()
    for _ in range(10):
        killed, crashed = killed.after(0.5, killed=True), crashed.after(0.5)
    assert killed.wait_s == 0.4
    assert crashed.wait_s == LONGEST_S


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    folder = tmp_path / "hypercast"
    folder.mkdir()
    (folder / "config.toml").write_text('url = "http://file:1"\napi_key = "file"\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert resolve(None, None, environ).url == "http://file:1"
    environ["HYPERCAST_URL"] = "env:2/"
    found = resolve(None, "flag", environ)
    assert (found.url, found.api_key) == ("http://env:2", "flag")
    assert "flag" not in repr(found)
    (folder / "config.toml").write_text('adress = "x"\n')
    with pytest.raises(UsageError, match="adress"):
        resolve(None, None, environ)


def test_tables_json_and_csv_hold_the_same_data() -> None:
    rows = [{"name": "a,b", "count": 3, "extra": [1, 2]}, {"name": "c", "count": None}]
    assert json.loads(render(rows, ("name", "count"), "json")) == rows
    assert render(rows, ("name", "count"), "csv") == 'name,count\n"a,b",3\nc,\n'
    text = render(rows, ("name", "count"), "table")
    assert "a,b" in text and "count" in text


def test_a_table_cuts_nothing_off_and_reads_well() -> None:
    rows = [
        {"id": "x" * 300, "image_bytes": 15870976, "created_at": 0.5, "count": 7},
        {"id": "y", "image_bytes": 0, "created_at": None, "count": 12},
    ]
    head, rule, first, second = render(
        rows, ("id", "image_bytes", "created_at", "count"), "table"
    ).splitlines()
    assert head.split("   ")[-1].strip() == "count" and set(rule) == {"─", " "}
    assert first.split() == ["x" * 300, "15.1", "MiB", "1970-01-01T00:00:00Z", "7"]
    assert second.split() == ["y", "0", "B", "12"] and second.endswith("   12")
