"""The pure parts of the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.errors import UsageError
from cli.output import flattened, render
from cli.settings import resolve
from cli.supervise.backoff import LONGEST_S, YOUNG_S, Backoff
from cli.supervise.settings import Joined, UpSettings, settle
from cli.supervise.supervisor import arguments
from cli.tables import Column, coloured, fields, table
from cli.values import age, duration, exact_amount, money
from gateway.core.settings import parse as parse_gateway
from invoker.settings import parse_settings
from registry.config.options import FLAGS, Options, decode_options, encode_options
from registry.errors import InvalidRecord
from registry.tracing.settings import TracingSettings
from registry.units.durations import parse_duration


def settings(*, gpus: int = 0, **changes: Any) -> UpSettings:
    return settle(Options(data_dir=Path("/tmp/x"), **changes), gpus=gpus, cores=2)


def test_nodes_default_to_the_gpus_else_two() -> None:
    assert (settings().nodes, settings().device) == (2, "cpu")
    assert (settings(gpus=4).nodes, settings(gpus=4).devices[3]) == (4, "cuda:3")
    assert settings(nodes=3, hosts=2).host_ids == ("host-0", "host-1", "host-0")
    assert settings(nodes=3).host_ids == (None, None, None)


def test_nodes_may_have_several_gpus_each() -> None:
    pairs = settings(gpus=5, device="cudax2")
    assert (pairs.nodes, pairs.devices) == (2, ("cuda:0,1", "cuda:2,3"))
    assert settings(gpus=8, device="cudax4", nodes=1).devices == ("cuda:0,1,2,3",)
    for device, nodes, words in (
        ("cudax2", 3, "--nodes 3 with 2 GPUs each is more than the 5 GPUs"),
        ("cudax8", None, "--nodes 1 with 8 GPUs each is more than the 5 GPUs"),
        ("cudax0", None, "unknown device"),
    ):
        with pytest.raises(UsageError, match=words):
            settings(gpus=5, device=device, nodes=nodes)


def test_hosts_are_spread_over_leaf_switches() -> None:
    assert settings(nodes=5, hosts=4, leaves=2).leaves == ("leaf-0", "leaf-0", "leaf-1", "leaf-1", "leaf-0")
    assert settings(nodes=3, link_rate_bytes_s=1, leaves=3).leaves == ("leaf-0", "leaf-1", "leaf-2")
    assert settings(nodes=2, hosts=2).leaves == (None, None)
    joined = Joined(redis_url="unix:///r", secret_file=Path("/s"))
    options = settings(nodes=2, hosts=2, leaves=2).of_nodes(joined)
    assert [options[f"node-{index}"].leaf for index in (0, 1)] == ["leaf-0", "leaf-1"]
    with pytest.raises(UsageError, match="--leaves needs --hosts or --link-rate"):
        settings(nodes=2, leaves=2)
    with pytest.raises(UsageError, match="--leaves must be 1 to the number of hosts"):
        settings(nodes=4, hosts=2, leaves=3)


def test_a_link_rate_implies_a_host_for_each_node() -> None:
    assert settings(nodes=3, link_rate_bytes_s=1).hosts == 3


def test_emulated_nodes_have_the_links_of_their_datasheet() -> None:
    found = settings(device="emulated:h800/1000/10", nodes=3)
    assert (found.options.link_rate_bytes_s, found.hosts) == (5_000_000, 3)
    assert found.devices == ("emulated:h800/1000/10",) * 3
    assert settings(device="emulated:a800/1000/10", nodes=3).options.link_rate_bytes_s == 1_250_000
    assert settings(device="emulated:h800/1000", link_rate_bytes_s=7).options.link_rate_bytes_s == 7


def test_every_option_reaches_the_processes_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 40)
    joined = Joined(redis_url="redis://h", secret_file=tmp_path / "secret")
    given = settings(kv_moves="never", nodes=2, hosts=2, gpu_memory_bytes=1 << 30, meter_interval_s=2.0)
    nodes = {name: parse_settings(arguments(one), {}) for name, one in given.of_nodes(joined).items()}
    assert [(one.node_id, one.host_id) for one in nodes.values()] == [
        ("node-0", "host-0"),
        ("node-1", "host-1"),
    ]
    for node in nodes.values():
        assert (node.kv_moves, node.gpu_memory_bytes, node.meter_interval_s) == ("never", 1 << 30, 2.0)
        assert (node.redis_url, node.secrets, node.nodes_hint) == ("redis://h", (b"x" * 40,), 2)
    gateway = parse_gateway(arguments(given.of_gateway("gateway", 8001, joined)), {})
    assert (gateway.port, gateway.gateway_id, gateway.expect_nodes) == (8001, "gateway", 2)
    assert gateway.admin_key_file == given.data_dir / "admin.key"


def test_traces_and_logs_are_alike_in_all_processes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 40)
    joined = Joined(redis_url="redis://h", secret_file=tmp_path / "secret")
    wanted = {"otlp_endpoint": "http://c:4318", "trace_sample": 0.25, "trace_rate": 3, "log_format": "json"}
    given = settings(nodes=1, **wanted)
    gateway = parse_gateway(arguments(given.of_gateway("gateway", 8001, joined)), {})
    (node,) = (parse_settings(arguments(one), {}) for one in given.of_nodes(joined).values())
    assert gateway.tracing == TracingSettings(url="http://c:4318/v1/traces", share=0.25, rate=3)
    assert (node.tracing.url, node.log_format, gateway.log_format) == (gateway.tracing.url, "json", "json")
    with pytest.raises(SystemExit):
        parse_gateway(["--redis-url", "redis://h", "--store", "/s", "--trace-sample", "1.5"], {})


def test_each_gateway_has_a_metrics_port_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 40)
    joined = Joined(redis_url="redis://h", secret_file=tmp_path / "secret")
    given = settings(gateways=2, metrics_port=9100, metrics_host="10.0.0.1")
    assert given.metrics_ports == (9100, 9101) and settings(gateways=2).metrics_ports == (None, None)
    assert settings(gateways=2, metrics_port=0).metrics_ports == (0, 0)
    parsed = parse_gateway(arguments(given.of_gateway("gateway-1", 8001, joined, 9101)), {})
    assert (parsed.metrics_host, parsed.metrics_port) == ("10.0.0.1", 9101)
    assert parse_gateway(arguments(settings().of_gateway("g", 1, joined)), {}).metrics_port is None
    for wrong in (8001, 65535):
        with pytest.raises(UsageError, match="--metrics-port"):
            settings(gateways=2, port=8000, metrics_port=wrong)


def test_options_are_what_they_were_after_a_way_as_json() -> None:
    plain, changed = Options(), Options(nodes=3, shm_dir=Path("/x"), grace_s=1.5, nixl=True, redis_url="r")
    assert encode_options(plain) == "{}" and decode_options("{}") == plain
    assert decode_options(encode_options(changed)) == changed
    with pytest.raises(InvalidRecord, match="bad options"):
        decode_options('{"nodes": "three"}')


def test_every_flag_is_taken_by_a_command_and_has_a_help() -> None:
    for name, flag in FLAGS.items():
        assert flag.commands and flag.help.endswith("."), name
    assert len({flag.name for flag in FLAGS.values()}) == len(FLAGS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "emulated:h100"}, "use h800"),
        ({"device": "emulated:h800/0"}, "emulated:GPU"),
        ({"nodes": 0}, "--nodes"),
        ({"nodes": 2, "hosts": 3}, "--hosts"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda"}, "no NVIDIA GPU"),
        ({"device": "cuda", "gpus": 1, "nodes": 2}, "more than the 1 GPUs"),
        ({"nodes": 2, "hosts": 1, "link_rate_bytes_s": 1}, "--link-rate"),
        ({"shm_dir": Path("/proc/nowhere")}, "--shm-dir /proc/nowhere"),
        ({"otlp_endpoint": "collector:4318"}, "--otlp-endpoint is no URL"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
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


COLUMNS = tuple(Column(field=name) for name in ("name", "count"))


def test_json_and_csv_have_the_same_fields_and_values() -> None:
    rows = [{"name": "a,b", "count": 3, "extra": [1, 2], "made_at": 0.25}, {"name": "c", "count": None}]
    names = ("name", "count", "extra", "made_at")
    found = json.loads(render(rows, COLUMNS, names, "json"))
    assert found == [{**rows[0], "made_at": "1970-01-01T00:00:00.250Z"}, rows[1]]
    assert render(rows, COLUMNS, names, "csv").splitlines() == [
        "name,count,extra,made_at",
        '"a,b",3,1;2,1970-01-01T00:00:00.250Z',
        "c,,,",
    ]


def test_records_are_flat_as_csv() -> None:
    record = {"name": "f", "scaling": {"min": 0, "ends_at": None}, "nodes": [{"id": "n0"}]}
    assert flattened(record) == {
        "name": "f",
        "scaling.min": 0,
        "scaling.ends_at": None,
        "nodes": [{"id": "n0"}],
    }


def test_a_table_without_a_width_has_every_character() -> None:
    rows = [
        {"id": "x" * 300, "image_bytes": 15870976, "created_at": 0.5, "count": 7},
        {"id": "y", "image_bytes": 0, "created_at": None, "count": 12},
    ]
    columns = (
        Column(field="id", shrink=5),
        Column(field="image_bytes"),
        Column(field="created_at"),
        Column(field="count", numeric=True, drop=1),
    )
    head, first, second = table(rows, columns).splitlines()
    assert head.split() == ["ID", "IMAGE", "BYTES", "CREATED", "AT", "COUNT"]
    assert first.split() == ["x" * 300, "15.1", "MiB", "1970-01-01T00:00:00Z", "7"]
    assert second.split() == ["y", "0", "B", "12"] and second.endswith("   12")


TEXTS = st.text("abc ", max_size=60)


@given(rows=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=5), width=st.integers(20, 120))
def test_no_line_of_a_table_is_wider_than_the_terminal(rows: list[tuple[str, ...]], width: int) -> None:
    columns = (
        Column(field="a", shrink=5),
        Column(field="b", shrink=6, drop=1),
        Column(field="c", drop=2),
        Column(field="d", wide=True),
    )
    found = [dict(zip("abcd", (*row, "z" * 80), strict=True)) for row in rows]
    narrow = table(found, columns, width=width).splitlines()
    assert all(len(line) <= width for line in narrow) and len(narrow) == len(rows) + 1
    assert "z" not in "".join(narrow)
    wide = table(found, columns, width=width, wide=True)
    assert wide.count("z" * 80) == len(rows) and "…" not in wide


def test_values_that_are_cut_off_end_with_an_ellipsis() -> None:
    columns = (Column(field="name", shrink=4), Column(field="state", state=True))
    lines = table([{"name": "abcdefghij", "state": "ready"}], columns, width=14, colour=True).splitlines()
    assert lines[1] == "abcdef…  " + "\x1b[32mready\x1b[0m"
    assert coloured("lost  ").startswith("\x1b[31m") and coloured("gpu") == "gpu"


def test_long_values_break_between_words() -> None:
    text = fields([("Name", "tiny"), ("Reason", "one two three " + "x" * 40)], width=30)
    assert text.splitlines() == ["Name:    tiny", "Reason:  one two three", " " * 9 + "x" * 40]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "250ms"), (1, "1s"), (90, "90s"), (300, "5m"), (3600, "1h"), (0, "0s")]
)
def test_durations_are_as_options_accept_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text and parse_duration(text) == seconds


def test_ages_have_one_unit() -> None:
    assert [age(s) for s in (-1, 45.4, 119, 121, 7200, 86_400 * 9)] == ["0s", "45s", "119s", "2m", "2h", "9d"]


@pytest.mark.parametrize(
    ("nanos", "text"),
    [(0, "0.00"), (1, "0.000000001"), (23_850, "0.00002385"), (1_500_000_000, "1.50"), (-5 * 10**9, "-5.00")],
)
def test_money_is_exact(nanos: int, text: str) -> None:
    assert exact_amount(nanos) == text
    assert money(abs(nanos), "USD") == f"${text.removeprefix('-')}"
    assert money(abs(nanos), "CHF") == f"CHF {text.removeprefix('-')}"
