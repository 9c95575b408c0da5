"""Secrets of functions as the state holds them: sealed values by name, bounded in number and size."""

from dataclasses import dataclass, field, replace

from registry.errors import InvalidRecord, NotFound

MAX_SECRETS = 64
MAX_SECRET_BYTES = 16 << 10
MAX_SECRETS_BYTES = 64 << 10  # of one function


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """One secret: its size in plain text, when it was set (Unix seconds), and the ciphertext."""

    key: str
    nbytes: int
    set_at: float
    sealed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSecrets:
    """All secrets of a function, sorted by key."""

    function: str
    secrets: tuple[SealedSecret, ...] = ()

    def __post_init__(self) -> None:
        if len(self.secrets) > MAX_SECRETS:
            raise InvalidRecord(f"{self.function} would have more than {MAX_SECRETS} secrets")
        if any(secret.nbytes > MAX_SECRET_BYTES for secret in self.secrets):
            raise InvalidRecord(f"value: a secret has at most {MAX_SECRET_BYTES} bytes")
        if sum(secret.nbytes for secret in self.secrets) > MAX_SECRETS_BYTES:
            raise InvalidRecord(f"{self.function} would have more than {MAX_SECRETS_BYTES} bytes of secrets")

    def get(self, key: str) -> SealedSecret | None:
        """Return the secret of that key, None if there is none."""
        return next((secret for secret in self.secrets if secret.key == key), None)

    def put(self, secret: SealedSecret) -> "FunctionSecrets":
        """Return these with one set or replaced. Raises InvalidRecord above the bounds."""
        others = [one for one in self.secrets if one.key != secret.key]
        return replace(self, secrets=tuple(sorted([*others, secret], key=lambda one: one.key)))

    def without(self, key: str) -> "FunctionSecrets":
        """Return these without one. Raises NotFound."""
        if self.get(key) is None:
            raise NotFound(f"function {self.function} has no secret {key}")
        return replace(self, secrets=tuple(one for one in self.secrets if one.key != key))
