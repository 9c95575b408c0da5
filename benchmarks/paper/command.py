"""Run the experiments of the papers in parts, and write docs/RESULTS.md from their files.

run    runs the parts that are not done, then writes the page. Each part is one run of another benchmark, at
       most 15 minutes on two cores, and writes benchmarks/results/paper-PART.json; so after a kill or Ctrl-C
       the next run goes on. PARTS are names of parts or their first words (default: all). A part of which a
       record does not count, since the machine was too busy or a request failed, is run again.
list   shows the parts with their estimated minutes and their state.
write  writes the page and its plots from the files that there are.

examples:
  sudo python -m benchmarks.paper
  sudo python -m benchmarks.paper run trace-conv-8 sim
  sudo python -m benchmarks.paper run --again zigzag
  python -m benchmarks.paper list
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.arguments import at_least, make_parser
from benchmarks.harness.processes import ROOT, exit_on_sigterm
from benchmarks.harness.result_files import FigureError
from benchmarks.paper.page import PAGE, write
from benchmarks.paper.parts import PARTS, Part
from benchmarks.paper.pictures import draw
from benchmarks.paper.plan import InvalidPlan, Plan, State, plan
from benchmarks.paper.runner import Runner, hours
from benchmarks.tables import RESULTS
from benchmarks.testbed.network import unavailable_reason

LOGS = ROOT / ".bench" / "paper"


def say(line: str) -> None:
    print(line, flush=True)


def run(args: argparse.Namespace, runner: Runner, parts: Mapping[str, Part]) -> bool:
    """Run what is to run and write the page; return whether all that ran is done."""
    states = {part.name: runner.state(part) for part in parts.values()}
    found = plan(parts, states, asked=args.parts, again=args.again, no_testbed=unavailable_reason())
    _say_skipped(found)
    if found.run:
        say(f"{len(found.run)} parts, about {hours(found.minutes)}; logs are in {args.logs}")
    ended = runner.run(found)
    write_all(args.results, args.page)
    failed = {name: state for name, state in ended.items() if state is not State.DONE}
    for name, state in failed.items():
        say(f"{name}: {state}")
    return not failed


def write_all(results: Path, page: Path) -> None:
    """Write the page and draw its plots."""
    for path in draw(results):
        say(f"drew {path}")
    write(results, page)
    say(f"wrote {page}")


def show(runner: Runner, parts: Mapping[str, Part]) -> None:
    """Print the parts."""
    for part in parts.values():
        needs = ", needs root and iproute2" if part.testbed else ""
        say(f"{part.name:26} {part.minutes:4g} min  {runner.state(part):15} {part.shows}{needs}")
    missing = [part for part in parts.values() if runner.state(part) is not State.DONE]
    say(f"{len(missing)} of {len(parts)} to run, about {hours(sum(part.minutes for part in missing))}")


def _say_skipped(found: Plan) -> None:
    reasons: dict[str, list[str]] = {}
    for name, reason in found.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        say(f"skipped, {reason}: {' '.join(names)}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser("benchmarks.paper", __doc__)
    add = parser.add_argument
    add("action", nargs="?", choices=("run", "list", "write"), default="run", help="what to do (default run)")
    add("parts", nargs="*", metavar="PART", help="parts to run, or the first words of their names")
    add("--again", action="append", default=[], metavar="PART", help="run this part also if it is done")
    add("--retries", type=at_least(0), default=2, help="repetitions of a run that does not count")
    add("--results", type=Path, default=RESULTS, help="folder of the result files")
    add("--logs", type=Path, default=LOGS, help="folder of the logs")
    add("--page", type=Path, default=PAGE, help="the page")
    args = parser.parse_args(arguments)
    if args.parts and args.action != "run":
        parser.error(f"{args.action} takes no parts")
    return args


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> None:
    args = parse(arguments)
    exit_on_sigterm()
    runner = Runner(args.results, args.logs, args.retries, say)
    try:
        if args.action == "list":
            show(runner, parts)
        elif args.action == "write":
            write_all(args.results, args.page)
        elif not run(args, runner, parts):
            sys.exit(1)
    except (InvalidPlan, FigureError) as error:
        sys.exit(f"paper: {error}")
    except KeyboardInterrupt:
        print("paper: interrupted; the next run goes on with the parts that are not done", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
