"""A user's own handler in a process of its own, with resource limits."""
