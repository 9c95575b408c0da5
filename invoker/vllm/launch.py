"""The program that becomes vLLM's server: `-m invoker.vllm.launch NODE_PID MEMORY_BYTES PROGRAM ARGS`.

It forks a guard, which ends the server with all that it started when the node stops it or dies, or when they
exceed their memory, and then executes the program.
"""

import os
import sys

from invoker.handlers import confine
from invoker.handlers.guard import GroupLimits, fork_guarded

MAX_TASKS = 8192  # processes and threads
END_S = 3.0  # for a server to end by itself


def main() -> None:
    """Fork the guard, and become the program."""
    node, memory_bytes, program, *arguments = sys.argv[1:]
    confine.die_with(int(node))
    confine.close_descriptors(keep=2)
    os.umask(0o077)
    limits = GroupLimits(memory_bytes=int(memory_bytes), tasks=MAX_TASKS)
    fork_guarded(limits, node=int(node), end_s=END_S)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
