"""Calls that go on while a browser looks."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.fixtures.platform import Platform

_PROMPTS = ("import os\n", "def read_lines(path):\n    ", "class Point:\n")


@contextmanager
def calls_in_flight(platform: Platform, name: str, keys: Sequence[str], each: int) -> Iterator[None]:
    """Keep `each` calls of each key in flight."""
    over = threading.Event()

    def work(key: str, number: int) -> None:
        body = {"model": name, "prompt": _PROMPTS[number % 3], "max_tokens": 70, "ignore_eos": True}
        with platform.http() as http:
            while not over.is_set():
                http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    threads = [threading.Thread(target=work, args=(key, number)) for key in keys for number in range(each)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
