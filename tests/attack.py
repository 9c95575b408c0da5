"""`make attack`: attacks on real processes and sockets, and which boundary held, as a table.

Each row is one or more tests; `python -m tests.attack REDIS` runs those whose attack contains the word.
"""

import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table

HOSTILE = "tests/http/test_hostile_tenants.py"
CONNECTIONS = "tests/http/test_connections.py"
ESCAPES = "tests/unit/invoker/test_handler_escapes.py"
PRIVATE = "tests/platform/test_private_state.py"
LOST = "tests/platform/test_state_lost.py"
BILLED = "tests/http/test_delivered_is_billed.py"
ARCHIVE = "tests/contract/test_ledger_archive.py"

ATTACKS: Sequence[tuple[str, str, Sequence[str]]] = (
    ("long prompts, many inputs, tool calls, logprobs", "no stream stops for 250 ms", (HOSTILE,)),
    (
        "the same on a platform with nodes",
        "lease and channels stay",
        ("tests/platform/test_hostile_tenants.py",),
    ),
    ("pipelined requests without a key", "memory is freed", (f"{CONNECTIONS}::test_pipelined",)),
    (
        "many, and silent, connections",
        "others connect",
        (f"{CONNECTIONS}::test_an_address", f"{CONNECTIONS}::test_conn", f"{CONNECTIONS}::test_a_silent"),
    ),
    (
        "many large bodies",
        "503 beyond a budget",
        (f"{CONNECTIONS}::test_bodies", f"{CONNECTIONS}::test_a_tenant"),
    ),
    ("logs followed with a body", "places return once", (f"{CONNECTIONS}::test_following",)),
    ("a loader's variables in function.yaml", "refused", (f"{ESCAPES}::test_the_environment",)),
    ("a handler that talks to Redis", "no socket", (f"{ESCAPES}::test_redis",)),
    (
        "a handler and others' processes and files",
        "refused",
        (f"{ESCAPES}::test_other", f"{ESCAPES}::test_attributes"),
    ),
    ("memory hogs, memory files", "stopped", (f"{ESCAPES}::test_memory",)),
    ("a fork bomb", "stopped", (f"{ESCAPES}::test_a_fork",)),
    ("daemons that detach", "end with the handler", (f"{ESCAPES}::test_a_daemon",)),
    ("processor time of many processes", "counts in sum", (f"{ESCAPES}::test_processor",)),
    (
        "another tenant's log lines",
        "not in errors",
        (f"{ESCAPES}::test_a_caller", f"{ESCAPES}::test_a_start"),
    ),
    ("Redis emptied, restored, epochs lost", "service comes back", (LOST,)),
    ("Redis filled to its memory limit", "reads go on, comes back", ("tests/platform/test_redis_full.py",)),
    ("the master of Redis killed", "no acknowledged record lost", ("tests/platform/test_failover.py",)),
    ("a change that no record could show", "refused", ("tests/http/test_audit.py::test_no_change",)),
    (
        "a gateway killed in a change",
        "its record stays",
        ("tests/platform/test_audit.py::test_a_gateway_that_dies",),
    ),
    (
        "callers that try changes",
        "counted, recorded apart",
        ("tests/platform/test_audit.py::test_callers",),
    ),
    (
        "names of functions and nodes for strangers",
        "on a port of its own",
        ("tests/http/test_metrics_port.py",),
    ),
    ("kills, failover and wrong clocks in the archive", "no row lost or doubled", (ARCHIVE,)),
    ("work that ends without a bill", "billed, limited", (BILLED,)),
    (
        "tenants' private functions: calls, names, changes",
        "as if there were none",
        ("tests/http/test_owners.py", "tests/platform/test_tenants.py"),
    ),
    ("every route with a key of every role", "403 without the right", ("tests/http/test_roles.py",)),
    ("owners read by a release before them", "refused", ("tests/contract/test_state_access.py",)),
    (
        "another handler's secrets, values in logs and answers",
        "refused, masked",
        ("tests/unit/invoker/test_handler_secrets.py", "tests/http/test_secrets.py"),
    ),
    (
        "a slow store while blobs are swept",
        "the lease is renewed",
        ("tests/unit/gateway/test_blob_collector.py",),
    ),
    ("local users, strangers at Redis", "refused", (PRIVATE,)),
)


class Outcomes:
    """The pytest plugin that counts the outcomes of each attack's tests."""

    def __init__(self, chosen: Sequence[tuple[str, str, Sequence[str]]]) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name, _, _ in chosen}
        self._chosen = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for name, _, prefixes in self._chosen:
                if any(report.nodeid.startswith(prefix) for prefix in prefixes):
                    self.counts[name][report.outcome] += 1


def main(words: Sequence[str]) -> int:
    """Run the attacks whose name contains all of `words`; return 1 if a boundary did not hold."""
    chosen = [row for row in ATTACKS if all(word.lower() in row[0].lower() for word in words)]
    if not chosen:
        sys.stderr.write(f"no attack has {' '.join(words)!r} in its name\n")
        return 2
    outcomes = Outcomes(chosen)
    files = sorted({prefix.partition("::")[0] for _, _, prefixes in chosen for prefix in prefixes})
    code = pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[outcomes])
    table = Table("attack", "must hold", "result")
    for name, holds, _ in chosen:
        counts = outcomes.counts[name]
        result = (
            "[red]failed"
            if counts["failed"]
            else "[yellow]skipped"
            if not counts["passed"]
            else "[green]held"
        )
        tests = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        table.add_row(name, holds, f"{result}[/] ({tests or 'no test'})")
    Console().print(table)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
