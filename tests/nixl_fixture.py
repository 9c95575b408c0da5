"""What tests of NIXL share: whether its package is here, and how it is held to the network of one machine."""

import os
from functools import cache

from rdmacast.errors import CastError
from rdmacast.nixl_native import NativeDriver

# Before its library is loaded: agents of one process would read past each other's network.
os.environ.setdefault("UCX_TLS", "tcp")
# With them a process that had an agent of nixl 1.5.1 ends with a segmentation fault, whatever it did.
os.environ.setdefault("UCX_MODULES", "")


@cache
def why_no_nixl() -> str:
    """Empty where the package is there and makes agents."""
    try:
        NativeDriver().agent().close()
    except CastError as error:
        return str(error)
    return ""
