"""The cluster on one screen: `top` draws it again and again, `status` once."""

from collections import Counter
from collections.abc import Sequence

from cli.board import ClusterBoard, counted
from cli.tables import Column, Row, colours_wanted, table, terminal_width
from cli.values import age, human_bytes, utc

BAR = 20  # characters
MIN_ROWS = 3  # of a table, however low the screen is
_ORDER = ("ready", "loading", "starting", "asleep", "running", "complete")


def used(total: int, free: int) -> str:
    """Return how much of a memory is in use."""
    return f"{human_bytes(total - free)} / {human_bytes(total)}"


def bar(part: float, whole: float = 1.0) -> str:
    """Return a bar that is full only where all of it is there."""
    share = part / whole if whole else 1.0
    full = int(share * BAR)
    return f"{'█' * full}{'░' * (BAR - full)} {int(share * 100):3d}%"


def _instances(node: Row) -> str:
    """Return the functions that a node runs, with the progress of those that load."""
    found: Counter[str] = Counter()
    for one in node["instances"]:
        state = "" if one["state"] == "ready" else f" ({one['state']} {one['progress']:.0%})"
        found[f"{one['function']}:{one['version']}{state}"] += 1
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in found.items())


def _rate(field: str) -> Column:
    def shown(row: Row) -> str:
        return f"{row[field]:.1f}" if row[field] else ""

    return Column(
        field=field, heading=f"{field.removesuffix('_s').upper()}/S", numeric=True, shown=shown, drop=2
    )


def _ttft(row: Row) -> str:
    return "" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f} ms"


NODE_COLUMNS = (
    Column(field="id", heading="NODE", shrink=10),
    Column(field="host", shrink=8, drop=3),
    Column(field="state", state=True),
    Column(field="gpu_type", heading="DEVICE", shrink=8, drop=4),
    Column(
        field="gpu", heading="GPU MEMORY", shown=lambda row: used(row["gpu_bytes"], row["gpu_free_bytes"])
    ),
    Column(field="host_memory", shown=lambda row: used(row["host_bytes"], row["host_free_bytes"]), drop=2),
    Column(field="functions", shrink=16, shown=_instances),
)
FUNCTION_COLUMNS = (
    Column(field="name", heading="FUNCTION", shrink=12),
    Column(field="state", state=True),
    Column(field="ready", numeric=True),
    Column(field="starting", numeric=True, drop=3),
    Column(field="in_flight", heading="IN FLIGHT", numeric=True),
    Column(field="held", numeric=True, drop=1),
    _rate("requests_s"),
    _rate("tokens_s"),
    Column(field="ttft_ms", heading="TTFT", numeric=True, shown=_ttft, drop=4),
)
CAST_COLUMNS = (
    Column(field="cast_id", heading="CAST", shrink=8, drop=2),
    Column(field="function", shrink=12, shown=lambda row: f"{row['function']}:{row['version']}"),
    Column(field="state", state=True),
    Column(field="nodes", numeric=True, shown=lambda row: f"{row['done']}/{row['targets']}"),
    Column(field="progress", shown=lambda row: bar(row["progress"])),
    Column(field="planner", drop=3),
    Column(field="age_s", heading="AGE", numeric=True, shown=lambda row: age(row["age_s"]), drop=1),
)


def headline(board: ClusterBoard) -> str:
    """Return the cluster in two lines."""
    totals = board.totals()
    return (
        f"{utc(board.at)}  nodes: {counted(totals['nodes'], _ORDER) or 'none'}; "
        f"functions: {counted(totals['functions'], _ORDER) or 'none'}\n"
        f"{totals['in_flight']} calls in flight, {totals['held']} held; "
        f"{totals['requests_s']:.1f} requests/s, {totals['tokens_s']:.1f} tokens/s\n"
    )


def tables(board: ClusterBoard, height: int | None) -> str:
    """Return nodes, functions and casts as tables of at most `height` lines in all (None: any number)."""
    sections: list[tuple[Sequence[Row], Sequence[Column]]] = [
        (rows, columns)
        for rows, columns in (
            (board.nodes(), NODE_COLUMNS),
            (board.functions(), FUNCTION_COLUMNS),
            (board.casts(), CAST_COLUMNS),
        )
        if rows
    ]
    shown = []
    for (rows, columns), most in zip(
        sections, shares([len(rows) for rows, _ in sections], height), strict=True
    ):
        text = table(rows[:most], columns, width=terminal_width(), colour=colours_wanted())
        more = len(rows) - most
        shown.append(text + (f"… and {more} more\n" if more > 0 else ""))
    return "\n".join(shown)


def shares(wanted: Sequence[int], height: int | None) -> list[int]:
    """Return how many rows each table has, of a screen of `height` lines; short ones leave theirs to others.

    A table has a heading, a line for those that are left out, and one between it and the next.
    """
    if height is None:
        return list(wanted)
    left = max(0, height - 3 * len(wanted))
    found = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for position, index in enumerate(order):
        found[index] = min(wanted[index], max(MIN_ROWS, left // (len(order) - position)))
        left = max(0, left - found[index])
    return found
