"""Traces of requests: when each came, and how long its prompt and its answer were."""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


class BadTrace(ValueError):
    """A file that is no trace; the message names the line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, so many seconds after the first."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """Arrivals that fit a context, and how many had to be cut for that."""

    arrivals: tuple[Arrival, ...]
    prompts_capped: int
    outputs_capped: int


# Column names of the time, prompt and output of each format, and what one unit of its time is.
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_COMPACT = ("offset_ms", "prompt_tokens", "output_tokens")
_PLAIN = ("seconds", "prompt_tokens", "output_tokens")


def read_trace(path: Path) -> list[Arrival]:
    """A trace in Azure's format, our compact one or the plain one, also compressed, in order of time.

    Raises BadTrace, OSError.
    """
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (EOFError, OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: {error}") from error
    found = list(_rows(path, csv.reader(io.StringIO(text))))
    if not found:
        raise BadTrace(f"{path}: no requests")
    first_s = min(arrival.offset_s for arrival in found)
    shifted = (Arrival(a.offset_s - first_s, a.prompt_tokens, a.output_tokens) for a in found)
    return sorted(shifted, key=lambda arrival: arrival.offset_s)


def capped(arrivals: Iterable[Arrival], context: int) -> Capped:
    """The arrivals with at least one token each way and none beyond the context: prompts are cut first."""
    fitting, prompts, outputs = [], 0, 0
    for arrival in arrivals:
        output = min(max(arrival.output_tokens, 1), context - 1)
        prompt = min(max(arrival.prompt_tokens, 1), context - output)
        prompts += prompt < arrival.prompt_tokens
        outputs += output < arrival.output_tokens
        fitting.append(Arrival(arrival.offset_s, prompt, output))
    return Capped(arrivals=tuple(fitting), prompts_capped=prompts, outputs_capped=outputs)


def _rows(path: Path, reader: Iterator[Sequence[str]]) -> Iterator[Arrival]:
    head = [name.strip() for name in next(reader, [])]
    columns = next((known for known in (_AZURE, _COMPACT, _PLAIN) if set(known) <= set(head)), None)
    if columns is None:
        raise BadTrace(f"{path}: the first line must name the columns {', '.join(_PLAIN)}, or those of Azure")
    places = [head.index(name) for name in columns]
    for number, row in enumerate(reader, 2):
        if not row:
            continue
        try:
            time, prompt, output = (row[place] for place in places)
            seconds, arrival = _seconds(columns, time), (int(prompt), int(output))
        except (ValueError, IndexError) as error:
            raise BadTrace(f"{path}, line {number}: {error}") from error
        if min(arrival) < 0 or not -1e12 < seconds < 1e12:
            raise BadTrace(f"{path}, line {number}: a number is out of range")
        yield Arrival(seconds, *arrival)


def _seconds(columns: Sequence[str], text: str) -> float:
    if columns is _COMPACT:
        return int(text) / 1000
    if columns is _PLAIN:
        return float(text)
    # Seven digits after the point, one more than datetime takes.
    whole, _, fraction = text.strip().partition(".")
    at = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
    return at + float(f"0.{fraction or '0'}")
