"""Redis reaches its `maxmemory`: requests are refused with the reason, reads and leases go on."""

from itertools import count
from pathlib import Path

import httpx2
import pytest
from redis.exceptions import OutOfMemoryError

from registry import keys
from tests.fixtures.plain_redis import PlainRedis
from tests.fixtures.platform import Platform

LEASES = 20  # renewals of the controller's lease, each 0.5 s: longer than a node's lease lasts


def fill(redis: PlainRedis) -> None:
    """Fill Redis, and a little beyond, so that no connection that ends makes room for a write."""
    with pytest.raises(OutOfMemoryError):
        for number in count():
            redis.call("SET", f"filler:{number}", b"0" * (1 << 18))
    used = redis.call("INFO", "memory")["used_memory"]
    redis.call("CONFIG", "SET", "maxmemory", used - (1 << 20))


def free(redis: PlainRedis) -> None:
    redis.call("DEL", *redis.call("KEYS", "filler:*"))


def test_a_full_redis(tmp_path: Path) -> None:
    settings = ("--maxmemory", "24mb", "--maxmemory-policy", "noeviction")
    with PlainRedis(tmp_path / "redis", *settings) as redis:
        flags = ("--nodes", "1", "--device", "cpu", "--redis-url", redis.url)
        platform = Platform(data=tmp_path / "data", flags=flags)
        platform.up()
        try:
            platform.run("deploy", "builtin:echo", "--name", "echo")
            refused_and_back(platform, redis)
        finally:
            platform.down()


def refused_and_back(platform: Platform, redis: PlainRedis) -> None:
    with platform.http() as http:

        def status() -> int:
            return http.post("/functions/echo/invoke", json={"n": 1}).status_code

        platform.until("it serves", lambda: status() == 200)
        billed = redis.call("HLEN", keys.REQUESTS)
        fill(redis)
        platform.until("it refuses", lambda: status() == 503)
        refusal = http.post("/functions/echo/invoke", json={"n": 1})
        error = refusal.json()["error"]
        assert (refusal.status_code, error["code"]) == (503, "state_unavailable")
        assert "is full" in error["message"] and "retry-after" in refusal.headers
        deploy = platform.run("deploy", "builtin:echo", "--name", "more", check=False)
        assert deploy.returncode and "is full" in deploy.stderr

        def beats() -> int:
            return int(redis.call("HGET", keys.LEASE_EPOCHS, "controller beats"))

        until = beats() + LEASES
        platform.until("leases are renewed", lambda: beats() >= until)
        assert [node["id"] for node in platform.nodes()] == ["node-0"]
        assert http.get("/admin/usage/report").status_code == 200
        gateway = platform.process("gateway")
        gateway.kill()
        platform.until("the next gateway has started", lambda: safely(status) == 503)
        free(redis)
        platform.until("it serves again", lambda: status() == 200)
        assert redis.call("HLEN", keys.REQUESTS) > billed


def safely(status: object) -> int:
    try:
        return int(status())  # type: ignore[operator]
    except httpx2.TransportError:
        return 0
