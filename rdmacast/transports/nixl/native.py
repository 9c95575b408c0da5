"""NIXL through its package `nixl`, which is optional: imported only here, when a driver is made.

What of this has run, and where, is in docs/OPERATIONS.md ("RDMA and other transports").
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rdmacast.errors import DeviceError, NoTransport
from rdmacast.transports.nixl.agent import NixlAgent

_MEMORY = "DRAM"
_BACKEND = "UCX"


class NativeDriver:
    """A factory of agents with the backend UCX, which the environment configures (UCX_TLS and so on)."""

    def __init__(self) -> None:
        """Import the package. Raises NoTransport if it is absent."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it logs each agent
        try:
            self.api: Any = import_module("nixl._api")
        except ImportError as error:
            raise NoTransport(f"nixl cannot be imported: {error}") from error
        bindings = vars(self.api.nixlBind)
        self.errors = tuple(
            found for found in bindings.values() if isinstance(found, type) and issubclass(found, Exception)
        )

    def __repr__(self) -> str:
        return "NativeDriver()"

    def agent(self) -> NixlAgent:
        return NativeAgent(self)

    @contextmanager
    def refusals(self, what: str) -> Iterator[None]:
        """Translate NIXL's errors inside to DeviceError."""
        try:
            yield
        except self.errors as error:
            raise DeviceError(f"{what}: {error}") from error


class NativeTransfer:
    """A NixlTransfer; its handle is released at its end, never before: NIXL would go on writing."""

    def __init__(self, driver: NativeDriver, agent: Any, handle: Any, state: str) -> None:
        self._driver = driver
        self._agent = agent
        self._handle = handle
        self._state = state

    def __repr__(self) -> str:
        return f"NativeTransfer({self._state})"

    def has_ended(self) -> bool:
        with self._driver.refusals("a read failed"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state == "PROC":
                return False
            if self._state != "DONE":
                raise DeviceError(f"a read ended as {self._state}")
            self._handle.release()
        return True


class NativeAgent:
    """A NixlAgent without NIXL's own thread, which would spin: polling makes the progress."""

    def __init__(self, driver: NativeDriver) -> None:
        self._driver = driver
        api = driver.api
        with driver.refusals("no agent"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent: Any = api.nixl_agent(secrets.token_hex(8), config)
        self._registered: dict[tuple[int, int], Any] = {}

    def __repr__(self) -> str:
        return f"NativeAgent({'closed' if self._agent is None else len(self._registered)})"

    def register(self, address: int, nbytes: int) -> bytes:
        with self._driver.refusals("cannot register memory"):
            made = self._agent.register_memory([(address, nbytes, 0, "")], _MEMORY)
            self._registered[address, nbytes] = made
            return bytes(
                self._agent.get_partial_agent_metadata(made, inc_conn_info=True, backends=[_BACKEND])
            )

    def deregister(self, address: int, nbytes: int) -> None:
        made = self._registered.pop((address, nbytes), None)
        if made is not None and self._agent is not None:
            with self._driver.refusals("cannot deregister memory"):
                self._agent.deregister_memory(made)

    def add_peer(self, metadata: bytes) -> str:
        with self._driver.refusals("cannot use the peer's agent"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        with self._driver.refusals("cannot remove the peer's agent"):
            self._agent.remove_remote_agent(name)

    def read(self, peer: str, target: int, source: int, nbytes: int) -> NativeTransfer:
        with self._driver.refusals("cannot begin a read"):
            here = self._agent.get_xfer_descs([(target, nbytes, 0)], _MEMORY)
            there = self._agent.get_xfer_descs([(source, nbytes, 0)], _MEMORY)
            handle = self._agent.initialize_xfer("READ", here, there, peer, b"")
            return NativeTransfer(self._driver, self._agent, handle, self._agent.transfer(handle))

    def progress(self) -> None:
        with self._driver.refusals("cannot make progress"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        # The last reference closes its connections and all that is pending.
        self._agent = None
        self._registered.clear()
