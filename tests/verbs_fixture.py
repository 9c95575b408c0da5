"""What tests of RDMA share: whether this machine has a device."""

from functools import cache

from rdmacast.errors import NoTransport
from rdmacast.verbs_node import open_node


@cache
def why_no_rdma() -> str:
    """Empty where there is a device that can be used."""
    try:
        open_node().close()
    except NoTransport as error:
        return str(error)
    return ""
