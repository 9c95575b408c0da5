"""What the gateway remembers of keys."""

import pytest

from gateway.core.errors import Unauthorized
from gateway.tenants.auth import Authenticator
from registry.clock import FakeClock
from registry.config.secrets import new_api_key
from registry.memory.state import MemoryState
from registry.records.api_key import ApiKey, KeyRole


class Counting(MemoryState):
    """Counts how often each key was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, int] = {}

    async def key(self, key_id: str) -> ApiKey:
        self.asked[key_id] = self.asked.get(key_id, 0) + 1
        return await super().key(key_id)


async def test_a_flood_of_unknown_keys_leaves_real_ones_remembered() -> None:
    state, clock = Counting(), FakeClock()
    made = new_api_key("acme", KeyRole.CALLER, "ci", clock=clock)
    await state.put_key(made.key)
    auth = Authenticator(state, clock, cache_s=5)
    assert await auth.authenticate(bearer(made.plaintext)) == made.key
    for number in range(5000):
        await refused(auth, number)
    assert await auth.authenticate(bearer(made.plaintext)) == made.key
    assert state.asked[made.key.id] == 1
    asked = len(state.asked)
    await refused(auth, 4999)  # still remembered as none
    assert (len(state.asked), sum(state.asked.values())) == (asked, asked)
    clock.advance(5)
    await refused(auth, 4999)
    assert sum(state.asked.values()) == asked + 1


async def refused(auth: Authenticator, number: int) -> None:
    with pytest.raises(Unauthorized, match="unknown API key"):
        await auth.authenticate(bearer(f"hc_{number:016x}_{'x' * 43}"))


def bearer(plaintext: str) -> bytes:
    return f"Bearer {plaintext}".encode()
