"""/admin/usage over HTTP: groupings, GPU time, the check; forms; callers see their own."""

import io
from dataclasses import replace

import pytest

from registry.records.instance import InstanceState
from tests.fixtures.gateway_http import gateway
from tests.fixtures.registry_records import instance, node
from tests.fixtures.usage import fill, interval, part


async def test_reports_group_by_what_is_asked_for() -> None:
    async with gateway() as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        await fill(gw.state)
        whole = (await admin.get("/admin/usage/report")).json()["rows"]
        assert [list(row)[:3] for row in whole] == [["function", "tenant", "requests"]] * 2
        for by in ("key", "node,status", "hour", "day,version", "start_kind", "tenant,function"):
            rows = (await admin.get("/admin/usage/report", params={"by": by})).json()["rows"]
            for column in ("requests", "billed_gpu_ms", "cost_nanos"):
                assert sum(row[column] for row in rows) == sum(row[column] for row in whole)
            assert set(list(rows[0])[: len(by.split(","))]) == set(by.split(","))
        own = (await caller.get("/admin/usage/report?by=tenant,day")).json()["rows"]
        assert [(row["tenant"], row["day"]) for row in own] == [("acme", "2023-11-14")]
        assert (await caller.get("/admin/usage/report?by=day&tenant=other")).status_code == 403
        assert not (await admin.get("/admin/usage/report?key=nobody")).json()["rows"]
        refused = await admin.get("/admin/usage/report?by=colour")
        assert refused.status_code == 422 and "colour" in refused.json()["error"]["message"]
        text = await admin.get("/admin/usage/report?by=tenant", headers={"accept": "text/csv"})
        assert text.headers["content-type"].startswith("text/csv")
        assert text.text.splitlines()[0].startswith("tenant,requests,")
        assert len(text.text.splitlines()) == 3


async def test_a_summary_tells_what_a_period_held() -> None:
    async with gateway() as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        await fill(gw.state)
        rows = (await admin.get("/admin/usage/summary")).json()["rows"]
        assert [row["tenant"] for row in rows] == ["acme", "other"]
        assert (rows[0]["ok"], rows[0]["exec_p95_ms"], rows[0]["currency"]) == (1, 900, "USD")
        assert [row["tenant"] for row in (await caller.get("/admin/usage/summary")).json()["rows"]] == [
            "acme"
        ]
        assert not (await admin.get("/admin/usage/summary?since=1800000000")).json()["rows"]


async def test_gpu_time_in_every_form() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    async with gateway() as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        await fill(gw.state)
        path = "/admin/usage/gpu-time"
        (total,) = (await admin.get(path, params={"by": ""})).json()["rows"]
        assert total == {
            "from": 1_700_000_000.0,
            "to": 1_700_000_060.0,
            "allocated_ms": 60_000,
            "used_ms": 6000,
            "attributed_ms": 6001,
            "loading_ms": 1000,
            "idle_ms": 53_000,
            "lost_ms": 1000,
        }
        rows = (await admin.get(path)).json()["rows"]
        assert [(row["function"], row["tenant"], row["node"]) for row in rows] == [
            ("tiny", "", "n0"),
            ("tiny", "acme", "n0"),
            ("tiny", "other", "n0"),
        ]
        assert sum(row["attributed_ms"] for row in rows) == 6001
        (own,) = (await caller.get(path)).json()["rows"]
        assert (own["tenant"], own["attributed_ms"], own["idle_ms"]) == ("acme", 4000, 0)
        assert (await caller.get(f"{path}?tenant=other")).status_code == 403
        minutes = (await admin.get(f"{path}?resolution=1m&by=node&format=csv")).text.splitlines()
        assert minutes[0] == "from,to,node,allocated_ms,used_ms,attributed_ms,loading_ms,idle_ms,lost_ms"
        assert len(minutes) == 3
        answer = await admin.get(path, headers={"accept": "application/vnd.apache.parquet"})
        table = parquet.read_table(io.BytesIO(answer.content))
        assert table.num_rows == 3 and sum(table["allocated_ms"].to_pylist()) == 60_000
        for wrong in ("resolution=5m", "by=tenant,colour", "format=xml", "since=x"):
            assert (await admin.get(f"{path}?{wrong}")).status_code == 422
        await gw.state.add_interval(interval("old", start=-1e9, end=0))
        refused = await admin.get(f"{path}?resolution=1m")
        assert refused.status_code == 422 and "coarser" in refused.json()["error"]["message"]


async def test_the_check_names_what_does_not_add_up() -> None:
    async with gateway() as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        assert (await caller.get("/admin/usage/check")).status_code == 403
        await fill(gw.state)
        found = (await admin.get("/admin/usage/check")).json()
        assert found == {
            "verdict": "exact",
            "requests": 2,
            "instances_checked": 1,
            "nodes_checked": 1,
            "instances": [],
            "nodes": [],
        }
        await gw.state.add_interval(interval("i1", start=60, end=61, calls=(part("x/0", 0, 5),)))
        found = (await admin.get("/admin/usage/check")).json()
        assert found["verdict"] == "open"
        assert [(one["instance_id"], one["missing_us"]) for one in found["instances"]] == [("i1", 5)]
        # While the instance lives, a call may be in flight.
        await gw.state.put_node(node(), ttl_s=60)
        await gw.state.put_instance(replace(instance("i1"), state=InstanceState.READY), 1)
        await gw.cluster.refresh()
        found = (await admin.get("/admin/usage/check")).json()
        assert [one["verdict"] for one in found["instances"]] == [found["verdict"]] == ["open"]
        # A settled call must have a record.
        settled = interval("i2", start=70, end=71, calls=(part("y/0", 0, 7, over=True),))
        await gw.state.add_interval(settled)
        found = (await admin.get("/admin/usage/check")).json()
        assert found["verdict"] == "wrong"
        assert [one["instance_id"] for one in found["instances"] if one["verdict"] == "wrong"] == ["i2"]
