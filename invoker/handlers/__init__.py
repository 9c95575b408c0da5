"""User handlers: a user's own code in a process of its own, with resource limits.

- `builtin`: handlers that run in the node itself
- `child`: the program of a handler's process
- `confine`: the restrictions that the process puts on itself, and what a node allows (Linux)
- `errors`: the exceptions of handlers
- `files`: a handler's private folder
- `guard`: the handler's parent, which holds it to its limits and kills all that it started
- `landlock`: what the process may read, write and connect to
- `log_lines`: a process's output as lines, bounded in length and rate
- `process`: the node's side: start, invoke, stop, restart with backoff
- `protocol`: the frames between the node and the process
- `running`: one running process: its socket, calls and output
- `secret_values`: a handler's secrets, and their removal from its output
- `seccomp`: the system calls that the process may not make
- `spawn`: starts and stops the process
- `syscalls`: calls of the kernel that Python has no function for
- `usage`: what a process group uses
"""
