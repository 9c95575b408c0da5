"""The tokens of a model that is not there: each follows from all before it, so that none can be lost,
repeated or changed unseen, wherever the sequence goes on."""

from collections.abc import Iterable

from registry.messages import Sampling

FIRST_TOKEN = 16  # below are those that end a sequence, or begin one

_MASK = 0xFFFFFFFFFFFFFFFF


class TokenChain:
    """The tokens of a sequence up to some point, as one number."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.count = 0
        self._state = 0x9E3779B97F4A7C15
        self.follow(tokens)

    def follow(self, tokens: Iterable[int]) -> None:
        """Take in the tokens that come next."""
        state = self._state
        for token in tokens:
            state = ((state ^ token) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
            self.count += 1
        self._state = state

    def next_token(self, sampling: Sampling, vocabulary: int) -> int:
        """The token that follows; with a temperature it depends on the seed, too."""
        word = self._state
        if sampling.temperature > 0:
            word ^= _mixed((sampling.seed + self.count * 0x9E3779B97F4A7C15) & _MASK)
        return FIRST_TOKEN + _mixed(word) % (vocabulary - FIRST_TOKEN)


def continuation(
    context: Iterable[int], count: int, vocabulary: int, sampling: Sampling | None = None
) -> list[int]:
    """The `count` tokens that an emulated model generates after `context`."""
    chain, found, asked = TokenChain(context), [], sampling or Sampling(max_tokens=count)
    for _ in range(count):
        token = chain.next_token(asked, vocabulary)
        chain.follow((token,))
        found.append(token)
    return found


def _mixed(word: int) -> int:
    """SplitMix64's finaliser."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
    return word ^ word >> 31
