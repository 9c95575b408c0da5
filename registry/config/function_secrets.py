"""The secrets of functions: set, opened and encrypted anew; nothing else reads their values."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rdmacast.protocol.handshake import Secret, secrets_of
from registry.clock import Clock
from registry.config.handler_spec import bad_env_name
from registry.config.sealing import seal, unseal
from registry.errors import Conflict, InvalidRecord, NotFound
from registry.records.function import check_name
from registry.records.secret import MAX_SECRET_BYTES, FunctionSecrets, SealedSecret
from registry.state import SecretState

KEY_PATTERN = "[A-Z_][A-Z0-9_]{0,127}"
_KEY = re.compile(KEY_PATTERN)
_TRIES = 5


def check_secret_key(key: str) -> str:
    """Return the key, or raise InvalidRecord naming the rule it breaks."""
    if not _KEY.fullmatch(key):
        raise InvalidRecord(f"{key[:128]!r} is no name of a secret: use 1 to 128 of A-Z, 0-9 and '_'")
    if reason := bad_env_name(key):
        raise InvalidRecord(f"{key}: {reason}")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Reencryption:
    """Which secrets were encrypted anew, and which could not be decrypted, each as `function/key`."""

    reencrypted: tuple[str, ...]
    unreadable: tuple[str, ...]


class SecretVault:
    """Encrypts with the newest of the cluster's secrets, and decrypts with any: they rotate."""

    def __init__(self, state: SecretState, cluster_secret: Secret) -> None:
        self._state = state
        self._cluster_secret = cluster_secret

    def __repr__(self) -> str:
        return "<SecretVault>"

    async def put(self, function: str, key: str, value: str, clock: Clock) -> SealedSecret:
        """Set a secret. Raises InvalidRecord for a bad name or value, or above the bounds."""
        check_name(function)
        check_secret_key(key)
        plain = value.encode()
        if not 1 <= len(plain) <= MAX_SECRET_BYTES or "\0" in value:
            raise InvalidRecord(f"value: must be 1 to {MAX_SECRET_BYTES} bytes, none of them NUL")
        made = self._sealed(function, key, plain, clock.wall_s())
        await self._change(function, lambda known: known.put(made))
        return made

    async def delete(self, function: str, key: str) -> SealedSecret:
        """Delete a secret. Raises NotFound."""
        before = await self._change(function, lambda known: known.without(key))
        secret = before.get(key)
        assert secret is not None
        return secret

    async def values(self, function: str, needed: Sequence[str]) -> dict[str, str]:
        """Return these secrets. Raises NotFound for a missing one, InvalidRecord if it does not decrypt."""
        if not needed:
            return {}
        known = await self._state.function_secrets(function)
        if missing := [key for key in needed if known.get(key) is None]:
            raise NotFound(
                f"function {function} needs the secrets {', '.join(missing)}, which are not set: "
                f"`hypercast secrets set {function} {missing[0]}`"
            )
        wanted = [secret for secret in known.secrets if secret.key in needed]
        return {secret.key: self._opened(function, secret)[1].decode() for secret in wanted}

    async def reencrypt(self) -> Reencryption:
        """Encrypt all with the first of the cluster's secrets, what is encrypted so already left out."""
        done, closed = list[str](), list[str]()
        for function in await self._state.functions_with_secrets():
            before = await self._change(function, lambda known: self._renewed(known)[0])
            _, renewed, unreadable = self._renewed(before)
            done += [f"{function}/{key}" for key in renewed]
            closed += [f"{function}/{key}" for key in unreadable]
        return Reencryption(reencrypted=tuple(done), unreadable=tuple(closed))

    def _renewed(self, known: FunctionSecrets) -> tuple[FunctionSecrets, list[str], list[str]]:
        """Return the secrets encrypted anew, the keys of those that were, and of those that do not open."""
        after, renewed, unreadable = known, list[str](), list[str]()
        for secret in known.secrets:
            try:
                number, plain = self._opened(known.function, secret)
            except InvalidRecord:
                unreadable.append(secret.key)
                continue
            if number:
                after = after.put(self._sealed(known.function, secret.key, plain, secret.set_at))
                renewed.append(secret.key)
        return after, renewed, unreadable

    def _sealed(self, function: str, key: str, plain: bytes, set_at: float) -> SealedSecret:
        sealed = seal(secrets_of(self._cluster_secret)[0], plain, function, key)
        return SealedSecret(key=key, nbytes=len(plain), set_at=set_at, sealed=sealed)

    def _opened(self, function: str, secret: SealedSecret) -> tuple[int, bytes]:
        return unseal(secrets_of(self._cluster_secret), secret.sealed, function, secret.key)

    async def _change(
        self, function: str, change: Callable[[FunctionSecrets], FunctionSecrets]
    ) -> FunctionSecrets:
        """Apply a change by compare-and-set; return what was before."""
        for _ in range(_TRIES):
            before = await self._state.function_secrets(function)
            after = change(before)
            if after == before or await self._state.replace_secrets(before, after):
                return before
        raise Conflict(f"the secrets of {function} are being changed by others: retry")
