"""Log lines as JSON."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from registry.logs.context import LogContext, log_context
from registry.logs.lines import JsonLines, configure_logs


@contextmanager
def lines(level: int = logging.DEBUG) -> Iterator[tuple[logging.Logger, io.StringIO]]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines("node-0"))
    logger = logging.getLogger("tests.json_lines")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield logger, written
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def test_a_line_names_time_process_and_request() -> None:
    token = log_context.set(LogContext("req-1", "abc"))
    try:
        with lines() as (logger, written):
            logger.warning("node %s is %d %% full", "n0", 93)
    finally:
        log_context.reset(token)
    line = json.loads(written.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "logger": "tests.json_lines",
        "process": "node-0",
        "message": "node n0 is 93 % full",
        "request_id": "req-1",
        "trace_id": "abc",
    }


def test_without_a_request_no_ids_are_named() -> None:
    with lines() as (logger, written):
        logger.info("started")
    assert json.loads(written.getvalue()).keys() == {"time", "level", "logger", "process", "message"}


def test_no_text_makes_two_lines_or_none() -> None:
    with lines() as (logger, written):
        logger.info('a\nb "c" \x00 \u2028 \udcff')
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            logger.exception("failed")
    first, second, rest = written.getvalue().split("\n")
    assert not rest
    first, second = json.loads(first), json.loads(second)
    assert first["message"].startswith('a\nb "c" \x00 \u2028')
    assert "ValueError: first\nsecond" in second["exception"]


def test_text_stays_as_it_was(capsys: object) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logs("info", "text", "node-0", shows_process=True)
        (handler,) = root.handlers
        record = logging.LogRecord("invoker.node", logging.INFO, __file__, 1, "up", None, None)
        assert handler.format(record).endswith(" INFO node-0 invoker.node: up")
        configure_logs("info", "text", "gateway")
        assert root.handlers[0].format(record).endswith(" INFO invoker.node: up")
        configure_logs("warning", "json", "gateway")
        assert json.loads(root.handlers[0].format(record))["process"] == "gateway"
        assert root.level == logging.WARNING
    finally:
        root.handlers[:] = before
        root.setLevel(level)
