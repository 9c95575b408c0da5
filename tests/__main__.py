"""All tests in two processes at once: those that start platforms, one after another, and the others.

Platforms mostly wait, so a machine with two processors is done in little more than half the time. Who runs
what: see tests/lanes.py. What is given on the command line goes to both.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "tests.lanes", "--durations=15", "--durations-min=2")
NOTHING_COLLECTED = 5


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as claims, tempfile.TemporaryFile("w+") as said:
        arguments = [f"--claims={claims}", *arguments]
        others = subprocess.Popen(
            [*PYTEST, "--lane=others", "-p", "no:cacheprovider", *arguments],
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        platforms = subprocess.Popen([*PYTEST, "--lane=platforms", *arguments])
        try:
            codes = {platforms.wait(), others.wait()} - {NOTHING_COLLECTED}
        except KeyboardInterrupt:  # they have heard it too, and stop the platforms that they have started
            codes = {platforms.wait(), others.wait()}
        finally:
            said.seek(0)
            print(said.read(), flush=True)
    if not codes:
        return NOTHING_COLLECTED
    return 0 if codes == {0} else 1  # a process killed by a signal has a code below 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
