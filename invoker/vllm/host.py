"""What a node needs to run vLLM servers: the interpreter, memory, and folders."""

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from invoker.engine.contract import UnsupportedModel
from invoker.host_tier.model_folders import ModelFolders
from invoker.vllm import check_args
from invoker.vllm.arguments import VllmSpec, base_environment
from invoker.vllm.errors import ServerFailed
from invoker.vllm.forking import VllmZygote
from invoker.vllm.model_infos import ModelInfos
from invoker.vllm.server import VllmServer
from rdmacast.aio.shielded import run_shielded, shielded_stack
from rdmacast.aio.threads import run_in_thread
from registry.config.engine_args import workers_of
from registry.images.adapters import CONFIG, FOLDER, adapters_of, rank_of
from registry.messages.images import ImageRef
from registry.messages.node import StartInstance

CHECK_TIMEOUT_S = 120.0
LEAST_BYTES = 4 << 30  # of each process that runs the model: its interpreter, and a KV cache
IMAGE_SHARE = 3  # times the image's bytes: weights, KV cache, and copies while it loads
_PROBE = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
_PROBE_TIMEOUT_S = 20.0
_MAX_MESSAGE = 1000

log = logging.getLogger("invoker.vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmHost:
    """Starts vLLM servers on this node, which together may take `memory_bytes`, with all their processes."""

    python: Path
    memory_bytes: int
    device: str
    scratch_dir: Path
    folders: ModelFolders
    attach: Path | None = None
    zygote: VllmZygote | None = None
    _infos: ModelInfos = field(default_factory=ModelInfos, init=False)
    _reserved: dict[str, int] = field(default_factory=dict, init=False)  # bytes of servers, by folder

    @property
    def loads_arriving(self) -> bool:
        """Whether a server loads an image as it arrives: its interpreter has the plug-in."""
        return self.attach is not None

    async def start(
        self, request: StartInstance, image: ImageRef, on_log: Callable[[str], None]
    ) -> VllmServer:
        """Start a server of an image, which is in the host tier, or arriving; it is not ready yet.

        Raises ServerFailed, also if there is no memory for one more server, HostTierError.
        """
        name = f"{request.function}-{request.version}.{request.instance_id}"
        async with shielded_stack() as stack:
            memory_bytes = self._reserve(name, image.nbytes, workers_of(request.engine_args))
            stack.push_async_callback(run_in_thread, self._release, name)
            linked = "" if self.loads_arriving else image.image
            folder = await run_in_thread(self.folders.open, name, linked, request.assets)
            scratch = await self._scratch(stack)
            spec = VllmSpec(
                python=self.python,
                folder=folder,
                scratch=scratch,
                name=request.function,
                dtype=request.dtype,
                context_length=request.context_length,
                max_sequences=request.max_concurrency,
                device=self.device,
                memory_bytes=memory_bytes,
                arguments=request.engine_args,
                adapters={
                    adapter: rank_of(request.assets[f"{FOLDER}/{adapter}/{CONFIG}"])
                    for adapter in adapters_of(request.assets)
                },
                loader={} if self.attach is None else {"image": image.image, "socket": str(self.attach)},
            )
            await run_in_thread(self._infos.write_into, scratch)
            server = await VllmServer.spawn(
                spec,
                on_log,
                on_ready=lambda: self._infos.keep(scratch),
                on_ended=lambda: self._release(name),
                zygote=self.zygote,
            )
            stack.pop_all()
            return server

    async def _scratch(self, stack: AsyncExitStack) -> Path:
        """Return a new folder, which the stack removes."""
        folder = Path(await run_in_thread(tempfile.mkdtemp, "", "", self.scratch_dir, undo=_remove))
        stack.push_async_callback(run_in_thread, _remove, folder)
        return folder

    def _reserve(self, name: str, image_bytes: int, workers: int) -> int:
        """Reserve the memory of a server; return its bytes. Raises ServerFailed."""
        used = sum(self._reserved.values())
        wanted = min(self.memory_bytes, max(workers * LEAST_BYTES, IMAGE_SHARE * image_bytes))
        if used + wanted > self.memory_bytes:
            raise ServerFailed(
                f"vLLM servers of this node take {used} bytes, and one more of {wanted} bytes exceeds "
                f"--vllm-memory, {self.memory_bytes} bytes"
            )
        self._reserved[name] = wanted
        return wanted

    def _release(self, name: str) -> None:
        self.folders.close_one(name)
        self._reserved.pop(name, None)

    async def check(self, arguments: Sequence[str], config: Mapping[str, object]) -> None:
        """Check with vLLM that it takes the arguments and has the architecture. Raises UnsupportedModel."""
        given = config.get("architectures")
        names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
        request = {"arguments": list(arguments), "architectures": names}
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                if self.zygote is not None and self.zygote.ready.is_set():
                    error = await self.zygote.check(request)
                else:
                    error = await self._check_alone(json.dumps(request).encode())
        except TimeoutError:
            raise ServerFailed(f"vLLM's check took longer than {CHECK_TIMEOUT_S:g} s") from None
        if error:
            raise UnsupportedModel(f"vLLM: {error[:_MAX_MESSAGE]}")

    async def _check_alone(self, request: bytes) -> str:
        """Check in a process of its own, which imports vLLM. Raises ServerFailed."""
        async with shielded_stack() as stack:
            scratch = await self._scratch(stack)
            environment = base_environment(scratch, self.device, os.environ)
            ended = await _run(
                self.python, check_args.__file__, given=request, folder=scratch, environment=environment
            )
        try:
            return str(json.loads(ended.output.strip().splitlines()[-1])["error"])
        except (ValueError, IndexError, KeyError, TypeError):
            log.warning("%s: %s", self.python, ended.errors.decode(errors="replace")[-2000:])
            raise ServerFailed(f"{self.python} cannot check arguments of vLLM: see the node's log") from None


def _remove(folder: str | os.PathLike[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)


async def has_module(python: Path, name: str) -> bool:
    """Return whether the interpreter can be run and finds a module, which is not imported."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            ended = await _run(python, "-I", "-c", _PROBE, name)
    except (ServerFailed, TimeoutError):
        return False
    return ended.status == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A process that has ended, and what it printed."""

    status: int | None
    output: bytes
    errors: bytes


async def _run(
    python: Path,
    *arguments: str,
    given: bytes | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> _Ended:
    """Run the interpreter to its end. Raises ServerFailed."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            *arguments,
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ServerFailed(f"{python} cannot be started: {error}") from error
    try:
        output, errors = await process.communicate(given)
    finally:
        await run_shielded(_killed(process))
    return _Ended(status=process.returncode, output=output, errors=errors)


async def _killed(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
