"""A process that has imported vLLM and forks its servers: run by vLLM's interpreter, beside the node.

    node ── zygote ── guard ── server

Standard input is a socket that keeps messages apart; each is a JSON object.

    node to zygote    {"id", "arguments", "environment", "folder", "memory_bytes", "tasks",
                       "end_s"}
                                           fork a server, with a descriptor for its output
                      {"id", "check"}      check a request of check_args in a fork
                      {"stop": ID}         end a fork
    zygote to node    {"ready": true}      once vLLM is imported
                      {"id", "pid"}, then {"id", "status"} at its end, of a fork
                      {"id", "error"}      of a check

A zygote ends with its node, and its servers with it. It starts no thread: none survives a fork.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_ROOT = str(Path(__file__).resolve().parents[2])
SERVER = "vllm.entrypoints.openai.api_server"
# What a server imports only when it starts.
_LATER = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
)
MAX_MESSAGE_BYTES = 128 << 10


def main() -> None:
    """Import vLLM, and fork servers until the node ends."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else its import starts threads
    sys.path.insert(0, _ROOT)
    from invoker.handlers import confine

    confine.die_with(int(sys.argv[1]))
    gc.disable()
    importlib.import_module(SERVER)
    for name in _LATER:  # not every release has them
        with suppress(ImportError):
            importlib.import_module(name)
    for name in ("invoker.handlers.guard", "invoker.vllm.check_args"):
        importlib.import_module(name)
    _set_title("hypercast vLLM zygote")
    sys.path.remove(_ROOT)
    # What was imported stays shared with the servers: their collectors do not touch it.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=0) as node:
        _Zygote(node).run()


class _Zygote:
    """The loop of the zygote. A server is waited for once it has ended: until then its pid is its own."""

    def __init__(self, node: socket.socket) -> None:
        self._node = node
        self._pids: dict[str, int] = {}
        self._ends: dict[int, str] = {}  # ids by the descriptors that report an end
        self._poll = select.poll()

    def run(self) -> None:
        self._poll.register(self._node, select.POLLIN)
        self._send({"ready": True})
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._node.fileno():
                    self._ended(descriptor)
                elif not self._carry_out():
                    return

    def _carry_out(self) -> bool:
        """Carry out one message; return False once the node has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self._node, MAX_MESSAGE_BYTES, 1)
        if not data:
            return False
        message = json.loads(data)
        if "stop" in message:
            with suppress(KeyError):  # it has ended meanwhile
                os.kill(self._pids[message["stop"]], signal.SIGTERM)
            return True
        zygote, pid = os.getpid(), os.fork()
        if not pid:
            if "check" in message:
                self._check(message, zygote)
            _become_server(message, descriptors[0], zygote)
        for output in descriptors:
            os.close(output)
        self._pids[message["id"]] = pid
        descriptor = os.pidfd_open(pid)
        self._ends[descriptor] = message["id"]
        self._poll.register(descriptor, select.POLLIN)
        self._send({"id": message["id"], "pid": pid})
        return True

    def _check(self, message: dict[str, Any], zygote: int) -> NoReturn:
        """Check arguments in this process, which ends with it."""
        from invoker.handlers import confine
        from invoker.vllm.check_args import check

        confine.die_with(zygote)
        status = 1
        try:
            self._send({"id": message["id"], "error": check(message["check"])})
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _ended(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        name = self._ends.pop(descriptor)
        _, status = os.waitpid(self._pids.pop(name), 0)
        self._send({"id": name, "status": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the next message is the end
            self._node.send(json.dumps(message).encode())


def _become_server(order: dict[str, Any], output: int, zygote: int) -> NoReturn:
    """Fork a guard and run vLLM's server; never returns."""
    from invoker.handlers import confine
    from invoker.handlers.guard import GroupLimits, fork_guarded
    from invoker.handlers.usage import memory_bytes_of

    os.setsid()
    confine.die_with(zygote)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    confine.close_descriptors(keep=2)
    os.umask(0o077)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    tempfile.tempdir = None
    # The guard adds its own memory to the limit: here that is vLLM's.
    memory_bytes = order["memory_bytes"] - memory_bytes_of(os.getpid())
    limits = GroupLimits(memory_bytes=memory_bytes, tasks=order["tasks"])
    _set_title("hypercast vLLM guard")
    fork_guarded(limits, node=zygote, end_s=order["end_s"])
    _set_title(" ".join([sys.executable, "-m", SERVER, *order["arguments"]]))
    sys.argv = [SERVER, *order["arguments"]]
    del sys.modules[SERVER]  # else running it warns
    code: object = 1
    try:
        runpy.run_module(SERVER, run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:  # without the interpreter's end, which takes all that was imported apart
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _set_title(title: str) -> None:
    """Set what `ps` shows of this process; vLLM brings the module."""
    with suppress(ImportError):
        importlib.import_module("setproctitle").setproctitle(title)


if __name__ == "__main__":
    main()
