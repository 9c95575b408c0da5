"""The tokens of an emulated model: each depends on all before it.

So a lost, repeated or changed token is detected on any node on which the sequence continues.
"""

from collections.abc import Iterable

from registry.messages.sampling import Sampling

FIRST_TOKEN = 16  # lower ids end a sequence, or begin one

_MASK = 0xFFFFFFFFFFFFFFFF


class TokenChain:
    """The tokens of a sequence up to some point, hashed into one number."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.count = 0
        self._state = 0x9E3779B97F4A7C15
        self.follow(tokens)

    def follow(self, tokens: Iterable[int]) -> None:
        """Add the tokens that come next."""
        state = self._state
        for token in tokens:
            state = ((state ^ token) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
            self.count += 1
        self._state = state

    def next_token(self, sampling: Sampling, vocabulary: int) -> int:
        """Return the token that follows; with a temperature it depends on the seed, too."""
        word = self._state
        if sampling.temperature > 0:
            word ^= _mixed((sampling.seed + self.count * 0x9E3779B97F4A7C15) & _MASK)
        return FIRST_TOKEN + _mixed(word) % (vocabulary - FIRST_TOKEN)


def continuation(
    context: Iterable[int], count: int, vocabulary: int, sampling: Sampling | None = None
) -> list[int]:
    """Return the `count` tokens that an emulated model generates after `context`."""
    chain, found, sampling = TokenChain(context), [], sampling or Sampling(max_tokens=count)
    for _ in range(count):
        token = chain.next_token(sampling, vocabulary)
        chain.follow((token,))
        found.append(token)
    return found


def _mixed(word: int) -> int:
    """Return SplitMix64's finaliser of the word."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
    return word ^ word >> 31
