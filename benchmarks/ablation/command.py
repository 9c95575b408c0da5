"""Measure what pre-allocation, tensor packing, registered memory and the block count bring to a transfer.

Moves an image from one process to another over our transports, each variant in turns, as in section 7.6 of
λScale. The image has as many bytes in as many tensors as a Llama of 24 layers; every read is checked (XXH3)
as it arrives.

pre_allocation          on: bytes are read into memory that was allocated and touched before.
                        off: each read allocates its own memory.
tensor_packing          on: all tensors are contiguous, a read takes a block with any tensors in it.
                        off: one read per tensor.
registered_host_memory  memory that a network adapter reads by itself. Without an RDMA device it is recorded
                        as skipped, with the reason.
blocks                  the number of reads of the packed image, everything else on.

`limit` copies and checks as many bytes between mapped memory, in the reading process. `median_s` is wall
time; `processor_s` is the reading process's CPU time, which other work on the machine affects less.

examples:
  python -m benchmarks.ablation --size 64MiB --rounds 5 --json ablation.json
  python -m benchmarks.ablation --transport tcp --blocks 8,16,24,32,48
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ablation.reads import SECRET, ReadCost, ReadPlan, by_blocks, by_tensors, copied, served
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, say, size, some_of
from benchmarks.harness.records import chosen, describe_run, recording, timed
from rdmacast.transport import PeerAddress, Transport
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport

TRANSPORTS = ("shm", "tcp")
ALL_ON_BLOCKS = 16  # λScale's best count


@dataclass(slots=True)
class TransferVariant:
    """A variant of the transfer; `reads` is None for the limit."""

    transport: str
    reads: ReadPlan | None
    pre_allocation: bool = True
    tensor_packing: bool = True
    costs: list[ReadCost] = field(default_factory=list)

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


def variants(nbytes: int, transports: Sequence[str], blocks: Sequence[int]) -> list[TransferVariant]:
    tensors, some = by_tensors(nbytes), by_blocks(nbytes, ALL_ON_BLOCKS)
    found = [TransferVariant("copy", None)]
    for transport in transports:
        found += [
            TransferVariant(transport, tensors, pre_allocation=False, tensor_packing=False),
            TransferVariant(transport, tensors, tensor_packing=False),
            TransferVariant(transport, some, pre_allocation=False),
            *(
                TransferVariant(transport, by_blocks(nbytes, count))
                for count in sorted({*blocks, ALL_ON_BLOCKS})
            ),
        ]
    return found


async def measure(found: Sequence[TransferVariant], peer: PeerAddress, args: argparse.Namespace) -> None:
    """Run the variants in turns; the first turn is not counted."""
    made: dict[str, Transport] = {"shm": ShmTransport(SECRET), "tcp": TcpTransport(SECRET)}
    for number in range(-1, args.rounds):
        for variant in found:
            if variant.reads is None:
                cost = copied(args.size)
            else:
                cost = await variant.reads.run(
                    made[variant.transport], peer, args.window, fresh=not variant.pre_allocation
                )
            if number >= 0:
                variant.costs.append(cost)
        say(f"{number + 1} of {args.rounds} rounds")


def records(
    found: Sequence[TransferVariant], args: argparse.Namespace, machine: dict[str, object]
) -> list[dict[str, Any]]:
    common = {"bytes": args.size, **chosen(args, "window", "rounds"), **machine}
    measured = [variant for variant in found if variant.costs]
    limits = [_median(variant) for variant in measured if variant.reads is None]
    rows = [_record(variant, min(limits, default=None), common) for variant in measured]
    skipped = {"name": "registered host memory", "params": {"registered_host_memory": True, **common}}
    return [*rows, skipped | {"seconds": [], "skipped": _why_not_registered()}]


def _record(variant: TransferVariant, limit_s: float | None, common: dict[str, Any]) -> dict[str, Any]:
    params = {
        "transport": variant.transport,
        "pre_allocation": variant.pre_allocation,
        "tensor_packing": variant.tensor_packing,
        "registered_host_memory": False,
        "blocks": len(variant.reads.parts) if variant.reads and variant.tensor_packing else None,
        "reads": len(variant.reads.parts) if variant.reads else 1,
        **common,
    }
    processor_s = statistics.median(cost.processor_s for cost in variant.costs)
    seconds = [cost.seconds for cost in variant.costs]
    return timed(variant.name, params, seconds, limit_s, processor_s=processor_s)


def _median(variant: TransferVariant) -> float:
    return statistics.median(cost.seconds for cost in variant.costs)


def _why_not_registered() -> str:
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        return "this machine has no RDMA device"
    return "this benchmark does not measure RDMA devices"


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    if "skipped" in row:
        return f"{'':4} {row['name']:36} skipped: {row['skipped']}"
    params = row["params"]
    share = f"{row['ratio_to_limit']:7.2f} x limit" if "ratio_to_limit" in row else ""
    return (
        f"{params['transport']:4} {row['name']:36} {params['reads']:4} reads {row['median_s'] * 1e3:8.1f} ms"
        f" {row['processor_s'] * 1e3:8.1f} ms CPU {share}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    found = variants(args.size, args.transport, args.blocks)
    machine = describe_run("benchmarks.ablation")
    with recording("ablation", json=args.json, show=show) as out:
        try:
            with served(args.size, args.shm_dir) as peer:
                asyncio.run(measure(found, peer, args))
        finally:
            out.add(*records(found, args, machine))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.ablation", __doc__)
    add = parser.add_argument
    add("--size", type=size, default="64MiB", help="image size")
    add("--transport", type=some_of(TRANSPORTS), default="shm,tcp", help="of shm,tcp")
    add("--blocks", type=comma_list(at_least(1)), default="1,4,8,16,24,32,48,64,128", help="block counts")
    add("--window", type=at_least(1), default=4, help="concurrent reads")
    add("--rounds", type=at_least(1), default=5, help="rounds")
    add("--shm-dir", type=Path, default=Path("/dev/shm"), help="folder in shared memory for the image")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
