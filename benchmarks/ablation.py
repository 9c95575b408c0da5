"""What pre-allocation, tensor packing, registered host memory and the number of blocks bring to a transfer.

`python -m benchmarks.ablation --json FILE` moves an image from one process to another by our transports, each
way in turns, as λScale's section 7.6 does. An image here is as many bytes in as many tensors as a Llama of 24
layers has; every read is checked (XXH3) as it arrives.

pre_allocation          on: the bytes land in memory that was taken and touched before.
                        off: each read takes fresh memory of its own.
tensor_packing          on: all tensors lie side by side, a read takes a block of whatever lies in it.
                        off: a read a tensor.
registered_host_memory  memory that a network adapter reads by itself. It needs an RDMA device: without one
                        it is recorded as skipped, with the reason.
blocks                  how many reads the packed image takes, all else on.

`limit` copies as many bytes between mapped memory and checks them, in the reading process. `median_s` is
by the clock; `processor_s` is the reading process' own processor time, which other work on the machine
lengthens less.

examples:
  python -m benchmarks.ablation --size 64MiB --rounds 5 --json ablation.json
  python -m benchmarks.ablation --transport tcp --blocks 8,16,24,32,48
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ablation_reads import SECRET, Reads, Spent, by_blocks, by_tensors, copied, served
from benchmarks.arguments import at_least, listed, parser_of, say, size
from benchmarks.machine import describe_machine, tell_records
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import PeerAddress, Transport

TRANSPORTS = ("shm", "tcp")
ALL_ON_BLOCKS = 16  # λScale's best


@dataclass(slots=True)
class Way:
    """`reads` None: the limit."""

    transport: str
    reads: Reads | None
    pre_allocation: bool = True
    tensor_packing: bool = True
    spent: list[Spent] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.reads is None:
            return "limit"
        off = [
            words
            for on, words in ((self.pre_allocation, "pre-allocation"), (self.tensor_packing, "packing"))
            if not on
        ]
        return f"without {' and '.join(off)}" if off else "all on"


def ways(nbytes: int, transports: Sequence[str], blocks: Sequence[int]) -> list[Way]:
    tensors, some = by_tensors(nbytes), by_blocks(nbytes, ALL_ON_BLOCKS)
    found = [Way("copy", None)]
    for transport in transports:
        found += [
            Way(transport, tensors, pre_allocation=False, tensor_packing=False),
            Way(transport, tensors, tensor_packing=False),
            Way(transport, some, pre_allocation=False),
            *(Way(transport, by_blocks(nbytes, count)) for count in sorted({*blocks, ALL_ON_BLOCKS})),
        ]
    return found


async def measure(found: Sequence[Way], peer: PeerAddress, args: argparse.Namespace) -> None:
    """Take the ways in turns; the first turn is not counted."""
    made: dict[str, Transport] = {"shm": ShmTransport(SECRET), "tcp": TcpTransport(SECRET)}
    for number in range(-1, args.rounds):
        for way in found:
            if way.reads is None:
                spent = copied(args.size)
            else:
                spent = await way.reads.run(
                    made[way.transport], peer, args.window, fresh=not way.pre_allocation
                )
            if number >= 0:
                way.spent.append(spent)
        say(f"{number + 1} of {args.rounds} rounds")


def records(
    found: Sequence[Way], args: argparse.Namespace, machine: dict[str, object]
) -> list[dict[str, Any]]:
    common = {"bytes": args.size, "window": args.window, "rounds": args.rounds, **machine}
    measured = [way for way in found if way.spent]
    limits = [_median(way) for way in measured if way.reads is None]
    rows = [_record(way, min(limits, default=None), common) for way in measured]
    skipped = {"name": "registered host memory", "params": {"registered_host_memory": True, **common}}
    return [*rows, skipped | {"seconds": [], "skipped": _why_not_registered()}]


def _record(way: Way, limit_s: float | None, common: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": way.name,
        "params": {
            "transport": way.transport,
            "pre_allocation": way.pre_allocation,
            "tensor_packing": way.tensor_packing,
            "registered_host_memory": False,
            "blocks": len(way.reads.parts) if way.reads and way.tensor_packing else None,
            "reads": len(way.reads.parts) if way.reads else 1,
            **common,
        },
        "seconds": [spent.seconds for spent in way.spent],
        "median_s": _median(way),
        "processor_s": statistics.median(spent.processor_s for spent in way.spent),
    }
    if limit_s is not None:
        row |= {"limit_s": limit_s, "ratio_to_limit": row["median_s"] / limit_s}
    return row


def _median(way: Way) -> float:
    return statistics.median(spent.seconds for spent in way.spent)


def _why_not_registered() -> str:
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        return "there is no RDMA device on this machine"
    return "this benchmark does not measure RDMA devices yet"


def show(row: dict[str, Any]) -> str:
    """One line for people."""
    if "skipped" in row:
        return f"{'':4} {row['name']:36} skipped: {row['skipped']}"
    params = row["params"]
    share = f"{row['ratio_to_limit']:7.2f} x limit" if "ratio_to_limit" in row else ""
    return (
        f"{params['transport']:4} {row['name']:36} {params['reads']:4} reads {row['median_s'] * 1e3:8.1f} ms"
        f" {row['processor_s'] * 1e3:8.1f} ms of processor {share}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    found = ways(args.size, args.transport, args.blocks)
    machine = describe_machine("benchmarks.ablation")
    interrupted = False
    try:
        with served(args.size, args.shm_dir) as peer:
            asyncio.run(measure(found, peer, args))
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted")
    rows = records(found, args, machine)
    tell_records(rows, show, args.json)
    sys.exit(130 if interrupted else 0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("benchmarks.ablation", __doc__)
    add = parser.add_argument
    add("--size", type=size, default=64 << 20, help="of the image (default: 64MiB)")
    add("--transport", type=listed(str, TRANSPORTS), default=list(TRANSPORTS), help="default: shm,tcp")
    add(
        "--blocks",
        type=listed(at_least(1)),
        default=[1, 4, 8, 16, 24, 32, 48, 64, 128],
        help="default: 1 to 128",
    )
    add("--window", type=at_least(1), default=4, help="reads at once (default: 4)")
    add("--rounds", type=at_least(1), default=5)
    add("--shm-dir", type=Path, default=Path("/dev/shm"), help="where the image lies in shared memory")
    add("--json", type=Path, help="write the records to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
