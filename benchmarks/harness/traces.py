"""Request traces: arrival times, prompt lengths and output lengths."""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


class InvalidTrace(ValueError):
    """A file that is not a trace; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, `offset_s` seconds after the first, to one of the functions that the trace is sent to."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int
    function: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedTrace:
    """Requests trimmed to a context length, and how many were shortened."""

    arrivals: tuple[TraceRequest, ...]
    prompts_capped: int
    outputs_capped: int


# Columns of each format: time, prompt tokens, output tokens.
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_COMPACT = ("offset_ms", "prompt_tokens", "output_tokens")
_PLAIN = ("seconds", "prompt_tokens", "output_tokens")


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace in Azure's, our compact or the plain format, optionally gzipped, ordered by time.

    Raises InvalidTrace, OSError.
    """
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (EOFError, OSError, UnicodeDecodeError) as error:
        raise InvalidTrace(f"{path}: {error}") from error
    found = list(_rows(path, csv.reader(io.StringIO(text))))
    if not found:
        raise InvalidTrace(f"{path}: no requests")
    first_s = min(arrival.offset_s for arrival in found)
    shifted = (TraceRequest(a.offset_s - first_s, a.prompt_tokens, a.output_tokens) for a in found)
    return sorted(shifted, key=lambda arrival: arrival.offset_s)


def trim_to_context(arrivals: Iterable[TraceRequest], context: int) -> TrimmedTrace:
    """Trim requests to the context, with at least one token each way; prompts are shortened first."""
    fitting, prompts, outputs = [], 0, 0
    for arrival in arrivals:
        output = min(max(arrival.output_tokens, 1), context - 1)
        prompt = min(max(arrival.prompt_tokens, 1), context - output)
        prompts += prompt < arrival.prompt_tokens
        outputs += output < arrival.output_tokens
        fitting.append(TraceRequest(arrival.offset_s, prompt, output, arrival.function))
    return TrimmedTrace(arrivals=tuple(fitting), prompts_capped=prompts, outputs_capped=outputs)


def _rows(path: Path, reader: Iterator[Sequence[str]]) -> Iterator[TraceRequest]:
    head = [name.strip() for name in next(reader, [])]
    columns = next((known for known in (_AZURE, _COMPACT, _PLAIN) if set(known) <= set(head)), None)
    if columns is None:
        raise InvalidTrace(f"{path}: the first line must name the columns {', '.join(_PLAIN)}, or Azure's")
    places = [head.index(name) for name in columns]
    for number, row in enumerate(reader, 2):
        if not row:
            continue
        try:
            time, prompt, output = (row[place] for place in places)
            seconds, arrival = _seconds(columns, time), (int(prompt), int(output))
        except (ValueError, IndexError) as error:
            raise InvalidTrace(f"{path}, line {number}: {error}") from error
        if min(arrival) < 0 or not -1e12 < seconds < 1e12:
            raise InvalidTrace(f"{path}, line {number}: a number is out of range")
        yield TraceRequest(seconds, *arrival)


def _seconds(columns: Sequence[str], text: str) -> float:
    if columns is _COMPACT:
        return int(text) / 1000
    if columns is _PLAIN:
        return float(text)
    # Seven fractional digits, one more than datetime parses.
    whole, _, fraction = text.strip().partition(".")
    at = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
    return at + float(f"0.{fraction or '0'}")
