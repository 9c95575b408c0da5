"""Requests and tokens per second, from counts that grow on several gateways."""

from gateway.watch.traffic import SAMPLE_S, ShownTraffic, TrafficMeter
from registry.records.change import CallTraffic, LoadReport, VersionLoad

KEY = ("tiny", 1)


def counts(requests: int, tokens: int = 0, first: int = 0, first_s: float = 0.0) -> CallTraffic:
    return CallTraffic(requests=requests, output_tokens=tokens, first_tokens=first, first_token_s=first_s)


def report(gateway: str, traffic: CallTraffic, in_flight: int = 0, held: int = 0) -> LoadReport:
    load = VersionLoad(function="tiny", version=1, in_flight=in_flight, held=held, traffic=traffic)
    return LoadReport(gateway=gateway, loads=(load,), ttl_s=10.0)


def only(meter: TrafficMeter, *reports: LoadReport) -> ShownTraffic:
    (shown,) = meter.shown(reports)
    return shown


def test_rates_are_of_the_last_seconds() -> None:
    meter = TrafficMeter("g0")
    for step in range(41):  # 20 s of 4 requests and 100 tokens a second
        meter.sample({KEY: counts(2 * step, 50 * step, step, 0.1 * step)}, (), step * SAMPLE_S)
    shown = only(meter)
    assert (shown.requests_s, shown.tokens_s, shown.ttft_ms) == (4.0, 100.0, 100.0)
    for step in range(41, 46):  # nothing more: tokens are forgotten sooner than requests
        meter.sample({KEY: counts(80, 2000, 40, 4.0)}, (), step * SAMPLE_S)
    shown = only(meter)
    assert shown.tokens_s == 0 and 0 < shown.requests_s < 4
    for step in range(46, 80):
        meter.sample({KEY: counts(80, 2000, 40, 4.0)}, (), step * SAMPLE_S)
    assert meter.shown(()) == []


def test_gateways_add_up_and_what_they_served_before_does_not_count() -> None:
    meter = TrafficMeter("g0")
    own = report("g0", counts(7), in_flight=1)
    meter.sample({KEY: counts(1000)}, (own, report("g1", counts(5000))), 0.0)
    meter.sample({KEY: counts(1010)}, (own, report("g1", counts(5020), in_flight=2, held=3)), 10.0)
    shown = only(meter, own, report("g1", counts(5020), in_flight=2, held=3))
    assert (shown.requests_s, shown.in_flight, shown.held) == (3.0, 3, 3)
    # g1 withdraws its report between two calls, then another process has its name: 4 requests more.
    meter.sample({KEY: counts(1010)}, (), 15.0)
    meter.sample({KEY: counts(1010)}, (report("g1", counts(4)),), 20.0)
    assert only(meter).requests_s == 0.4


def test_the_first_request_of_a_function_counts() -> None:
    meter = TrafficMeter("g0")
    meter.sample({}, (), 0.0)
    meter.sample({KEY: counts(1, 8, 1, 2.5)}, (), SAMPLE_S)
    shown = only(meter)
    assert (shown.requests_s, shown.tokens_s, shown.ttft_ms) == (2.0, 16.0, 2500.0)


def test_samples_are_apart_and_deleted_functions_are_forgotten() -> None:
    meter = TrafficMeter("g0")
    meter.sample({KEY: counts(0)}, (), 0.0)
    meter.sample({KEY: counts(100)}, (), SAMPLE_S / 2)  # too soon
    assert meter.shown(()) == []
    meter.sample({KEY: counts(100)}, (), SAMPLE_S)
    assert only(meter).requests_s == 100 / SAMPLE_S
    meter.keep(frozenset({"another"}))
    assert meter.shown(()) == []
