"""User handlers: a user's own code in a process of its own, with resource limits.

- `builtin`: handlers that run in the node itself
- `child`: the program of a handler's process
- `confine`: the restrictions that the process puts on itself (Linux)
- `errors`: the exceptions of handlers
- `files`: a handler's private folder
- `log_lines`: a process's output as lines, bounded in length and rate
- `process`: the node's side: start, invoke, stop, restart with backoff
- `protocol`: the frames between the node and the process
- `running`: one running process: its socket, calls and output
- `spawn`: starts a process and kills it with all its descendants
"""
