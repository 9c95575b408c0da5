"""The secrets of one handler in its node's memory, and their removal from what the handler writes."""

from collections.abc import Mapping

MASK = "***"
_MIN_MASKED = 8  # characters; the occurrence of a shorter value is likely chance


class SecretValues:
    """Values by key, which no repr shows."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        long = [value for value in values.values() if len(value) >= _MIN_MASKED]
        # The longest first: one may contain another.
        self._values = sorted(long, key=len, reverse=True)
        # The log has lines: of a value that has several, such as a private key, each by itself.
        lines = [line.strip() for value in long if "\n" in value for line in value.splitlines()]
        self._lines = frozenset(line for line in lines if len(line) >= _MIN_MASKED)

    def __repr__(self) -> str:
        return f"<SecretValues {', '.join(self.values)}>"

    def masked(self, text: str) -> str:
        """Return the text without exact occurrences of the values."""
        for value in self._values:
            text = text.replace(value, MASK)
        if self._lines:
            text = "\n".join(MASK if line.strip() in self._lines else line for line in text.split("\n"))
        return text
