"""Webhooks: delivered at least once, signed, tried again, and only to where they may go."""

import asyncio
import base64
from typing import Any

import openai
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from gateway.jobs.destinations import DestinationRefused, HookDestinations, parse_destinations
from gateway.jobs.signatures import secret_text, signed_headers, tenant_secret
from registry.errors import InvalidRecord
from tests.fixtures.gateway_http import Gateway
from tests.fixtures.hooks import hook_receiver
from tests.http.test_batches import jsonl, line
from tests.http.test_batches import serving as batches
from tests.http.test_predictions import call, serving

LOOPBACK: dict[str, Any] = {"hook_allow": ("127.0.0.0/8",), "hook_retries_s": (0.001, 0.001, 0.001)}


async def hook_status(
    gw: Gateway, name: str, wanted: str, http: Any, folder: str = "/predictions"
) -> dict[str, Any]:
    """Return a prediction, or a batch, once its webhook has a status; an event wakes this."""

    news = asyncio.Event()
    with gw.services.job_events.listening(lambda _: news.set()):
        while True:
            news.clear()
            found: dict[str, Any] = (await http.get(f"{folder}/{name}")).json()
            if found["webhook_status"] == wanted:
                return found
            await news.wait()


async def test_the_end_of_a_prediction_is_delivered_and_signed() -> None:
    async with hook_receiver() as receiver, serving(**LOOPBACK) as (gw, http):
        posted = (await http.post("/predictions", json=call(webhook=receiver.url))).json()
        await receiver.until(lambda: bool(receiver.received))
        (hook,) = receiver.received
        secret = (await http.get("/webhooks/secret")).json()["secret"]
        message = Webhook(secret).verify(hook.body, hook.headers)  # what a receiver does
        assert message["type"] == "prediction.completed"
        assert message["data"]["id"] == posted["id"] and message["data"]["output"] == {"n": 1}
        assert message["timestamp"] == posted["completed_at"]
        assert hook.headers["webhook-id"] == f"msg_{posted['request_id']}"
        assert hook.headers["content-type"] == "application/json"
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(hook.body + b" ", hook.headers)
        async with gw.http() as other:  # another tenant has another secret
            assert (await other.get("/webhooks/secret")).json()["secret"] != secret
        shown = await hook_status(gw, posted["id"], "delivered", http)
        assert shown["webhook"] == receiver.url


@pytest.mark.parametrize("valid", [True, False])
async def test_the_end_of_a_batch_is_delivered_and_signed(valid: bool) -> None:
    lines = jsonl(line("1")) if valid else b"nonsense"
    async with hook_receiver() as receiver, batches(**LOOPBACK) as (gw, client):
        file = await client.files.create(file=("calls.jsonl", lines), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_body={"webhook": receiver.url},
        )
        answers = iter((500, 204))
        receiver.answer = lambda _: next(answers)
        await receiver.until(lambda: len(receiver.received) == 2)
        assert len({hook.headers["webhook-id"] for hook in receiver.received}) == 1
        async with gw.http(client.api_key) as http:
            secret = (await http.get("/webhooks/secret")).json()["secret"]
            shown = await hook_status(gw, made.id, "delivered", http, "/v1/batches")
            metrics = (await http.get("/metrics")).text
        message = Webhook(secret).verify(receiver.received[1].body, receiver.received[1].headers)
        status = "completed" if valid else "failed"
        assert message["type"] == f"batch.{status}" and message["data"]["id"] == made.id
        assert message["data"]["output_file_id"] == shown["output_file_id"]
        assert (message["data"]["webhook"], shown["status"]) == (receiver.url, status)
        for outcome, count in (("delivered", 1), ("retried", 1), ("failed", 0)):
            assert f'hypercast_webhook_deliveries_total{{outcome="{outcome}"}} {count}.0' in metrics


async def test_a_batch_whose_webhook_has_no_way_is_refused() -> None:
    async with batches() as (_, client):
        file = await client.files.create(file=("calls.jsonl", jsonl(line("1"))), purpose="batch")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
                extra_body={"webhook": "https://10.0.0.1/hook"},
            )
        assert refused.value.param == "webhook"


async def test_a_delivery_that_fails_is_tried_again_with_the_same_id() -> None:
    async with hook_receiver() as receiver, serving(**LOOPBACK) as (gw, http):
        answers = iter((500, 302, 204))
        receiver.answer = lambda _: next(answers)
        posted = (await http.post("/predictions", json=call(webhook=receiver.url))).json()
        await hook_status(gw, posted["id"], "delivered", http)
        assert len(receiver.received) == 3  # redirects are not followed
        assert len({hook.headers["webhook-id"] for hook in receiver.received}) == 1


async def test_a_receiver_that_never_takes_it_is_given_up() -> None:
    async with hook_receiver() as receiver, serving(**LOOPBACK) as (gw, http):
        receiver.answer = lambda _: 503
        posted = (await http.post("/predictions", json=call(webhook=receiver.url))).json()
        await hook_status(gw, posted["id"], "failed", http)
        assert len(receiver.received) == 4


async def test_a_receiver_that_is_gone_gets_no_more() -> None:
    async with hook_receiver() as receiver, serving(**LOOPBACK) as (gw, http):
        receiver.answer = lambda _: 410
        posted = (await http.post("/predictions", json=call(webhook=receiver.url))).json()
        await hook_status(gw, posted["id"], "failed", http)
        assert len(receiver.received) == 1


async def test_a_name_that_leads_inside_is_refused_when_it_is_dialled() -> None:
    """A name looks good when it is given; what it leads to is found, and checked, at each connection."""
    async with hook_receiver() as receiver, serving() as (gw, http):
        url = f"https://localhost:{receiver.port}/hook"
        posted = (await http.post("/predictions", json=call(webhook=url))).json()
        await hook_status(gw, posted["id"], "failed", http)
        assert receiver.received == []


PUBLIC, INSIDE = HookDestinations(), parse_destinations(["10.0.0.0/8", "Hooks.Internal", "fd00::/8", ""])


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "172.16.0.1", "100.64.0.1", "0.0.0.0"),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "224.0.0.1"),
        *("2001:0:1::", "255.255.255.255", "ff02::1"),
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(DestinationRefused):
        PUBLIC.check_address("hooks.example", address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are_good(address: str) -> None:
    PUBLIC.check_address("hooks.example", address)


def test_the_operator_allows_networks_and_hosts() -> None:
    INSIDE.check_address("any", "10.1.2.3")
    INSIDE.check_address("any", "::ffff:10.1.2.3")
    INSIDE.check_address("any", "fd00::1")
    INSIDE.check_address("hooks.internal", "192.168.0.1")
    INSIDE.check_url("http://hooks.internal:8080/a")
    INSIDE.check_url("http://10.0.0.1/a")
    for refused in ("http://example.com/", "https://192.168.0.1/", "ftp://hooks.internal/", "https:///a"):
        with pytest.raises(DestinationRefused):
            INSIDE.check_url(refused)
    for entry in ("10.0.0.0/40", "10.0.0.300"):
        with pytest.raises(InvalidRecord):
            parse_destinations([entry])


def test_each_valid_secret_of_the_cluster_signs() -> None:
    secrets = [tenant_secret(secret, "acme") for secret in (b"new", b"old")]
    assert secrets[0] != tenant_secret(b"new", "beta")
    headers = signed_headers(secrets, "msg_1", 1e10, b"{}")
    assert len(headers["webhook-signature"].split(" ")) == 2
    assert base64.b64decode(secret_text(secrets[0]).removeprefix("whsec_")) == secrets[0]
    with pytest.raises(WebhookVerificationError):  # of another time: refused as a replay
        Webhook(secret_text(secrets[0])).verify(b"{}", headers)
