"""Metrics by vLLM's names and by tenant, each behind its flag, of requests over real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.contract import DispatchError, Event, FunctionCall
from gateway.fakes.dispatcher import HOT
from gateway.http.tenant_metrics import OTHERS
from registry.config.secrets import new_api_key
from registry.messages.node import Tokens
from registry.records.api_key import KeyRole
from registry.records.function import FunctionTask
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway

ENGINE = {"model_name": "coder", "engine": "0"}


async def rows(gw: Gateway) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the value of each sample by its name and labels."""
    async with gw.http() as http:
        text = (await http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def row(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def complete(gw: Gateway, key: str | None = None, **more: object) -> httpx2.Response:
    async with gw.http(key or gw.caller_key) as http:
        body = {"model": "coder", "prompt": [1, 2, 3], "max_tokens": 5, **more}
        return await http.post("/v1/completions", json=body)


async def test_functions_that_generate_have_the_metrics_of_vllm() -> None:
    async with gateway(vllm_metrics=True) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await gw.add_function("handler", FunctionTask.HANDLER)
        before = await rows(gw)
        assert before[row("vllm:num_requests_running", **ENGINE)] == 0
        assert before[row("vllm:num_requests_waiting", **ENGINE)] == 0
        assert not any(dict(labels).get("model_name") == "handler" for _, labels in before)
        assert (await complete(gw)).status_code == 200
        assert (await complete(gw, n=2, max_tokens=4)).status_code == 200
        found = await rows(gw)
        assert found[row("vllm:prompt_tokens_total", **ENGINE)] == 6  # of a prompt once for all its choices
        assert found[row("vllm:generation_tokens_total", **ENGINE)] == 13
        assert found[row("vllm:request_success_total", **ENGINE, finished_reason="length")] == 3
        for name, count in {
            "time_to_first_token_seconds": 3,
            "e2e_request_latency_seconds": 3,
            "request_queue_time_seconds": 3,
            "request_prefill_time_seconds": 3,
            "request_decode_time_seconds": 3,
            "request_inference_time_seconds": 3,
            "request_time_per_output_token_seconds": 3,
            "inter_token_latency_seconds": 4 + 3 + 3,  # gaps
            "time_per_output_token_seconds": 4 + 3 + 3,
            "request_prompt_tokens": 2,
            "request_generation_tokens": 2,
        }.items():
            assert found[row(f"vllm:{name}_count", **ENGINE)] == count, name
            assert found[row(f"vllm:{name}_bucket", **ENGINE, le="+Inf")] == count, name
        assert found[row("vllm:request_generation_tokens_sum", **ENGINE)] == 13
        parts = [
            found[row(f"vllm:request_{part}_time_seconds_sum", **ENGINE)] for part in ("queue", "inference")
        ]
        assert sum(parts) == pytest.approx(found[row("vllm:e2e_request_latency_seconds_sum", **ENGINE)])


async def test_calls_that_fail_or_are_left_have_reasons_of_their_own() -> None:
    async with gateway(vllm_metrics=True) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        started = asyncio.Event()

        async def fails(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            raise DispatchError("internal", "lost", status=500)

        async def hangs(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield Tokens(ids=(1,))
            started.set()
            await asyncio.Event().wait()

        gw.dispatcher.script = fails
        assert (await complete(gw)).status_code == 500
        gw.dispatcher.script = hangs
        leaving = asyncio.create_task(complete(gw, stream=True))
        await started.wait()
        leaving.cancel()
        async with asyncio.timeout(30):
            while row("vllm:request_success_total", **ENGINE, finished_reason="abort") not in await rows(gw):
                pass
        found = await rows(gw)
        assert found[row("vllm:request_success_total", **ENGINE, finished_reason="error")] == 1


async def test_without_the_flags_there_are_none() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        assert (await complete(gw)).status_code == 200
        found = await rows(gw)
        assert not any(name.startswith(("vllm:", "hypercast_tenant_")) for name, _ in found)
        assert found[row("hypercast_tokens_total", function="coder", kind="completion")] == 5
        assert found[row("hypercast_request_gpu_seconds_total", function="coder")] == 0.001
        assert found[row("hypercast_cost_total", function="coder")] > 0


async def test_the_rows_of_a_deleted_function_go() -> None:
    async with gateway(vllm_metrics=True) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        assert (await complete(gw)).status_code == 200
        await gw.state.delete_function("coder")
        await gw.cluster.refresh()
        await rows(gw)
        assert not any({"coder"} & {value for _, value in labels} for _, labels in await rows(gw))


async def test_tenants_beyond_the_bound_share_a_row() -> None:
    async with gateway(tenant_metrics=2) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        for tenant in ("one", "two", "three", "four", "one"):
            made = new_api_key(tenant, KeyRole.CALLER, "k")
            await gw.state.put_key(made.key)
            assert (await complete(gw, made.plaintext)).status_code == 200
        found = await rows(gw)

        def of(name: str, **more: str) -> dict[str, float]:
            return {
                dict(labels)["tenant"]: value
                for (sample, labels), value in found.items()
                if sample == f"hypercast_tenant_{name}" and more.items() <= dict(labels).items()
            }

        assert of("requests_total", status="ok") == {"one": 2, "two": 1, OTHERS: 2}
        assert of("tokens_total", kind="prompt") == {"one": 6, "two": 3, OTHERS: 6}
        assert of("tokens_total", kind="completion") == {"one": 10, "two": 5, OTHERS: 10}
        assert of("gpu_seconds_total") == {"one": 0.002, "two": 0.001, OTHERS: 0.002}
        assert of("cost_total")["one"] == pytest.approx(2 * of("cost_total")["two"])
        assert of("limited_requests_total") == {"one": 0, "two": 0, OTHERS: 0}


async def test_what_a_limit_refused_counts_for_its_tenant() -> None:
    async with gateway(tenant_metrics=2) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        made = new_api_key("tight", KeyRole.CALLER, "k")
        await gw.state.put_key(replace(made.key, requests_per_minute=1))
        statuses = [(await complete(gw, made.plaintext)).status_code for _ in range(3)]
        assert sorted(statuses) == [200, 429, 429]
        found = await rows(gw)
        assert found[row("hypercast_tenant_limited_requests_total", tenant="tight")] == 2
        assert found[row("hypercast_tenant_requests_total", tenant="tight", status="ok")] == 1
