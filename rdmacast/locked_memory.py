"""The limit of memory that this process may lock, as each registration with a device does."""

import resource


def locked_limit() -> int | None:
    """Return the limit in bytes; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def why_not_locked(nbytes: int, locked_bytes: int) -> str:
    """Return why `nbytes` more could not be locked, after `: `; empty if the limit is not the reason."""
    limit = locked_limit()
    if limit is None or locked_bytes + nbytes <= limit:
        return ""
    return (
        f": RLIMIT_MEMLOCK lets this process lock {limit} bytes, {locked_bytes} are; raise it"
        " (ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in Docker)"
    )
