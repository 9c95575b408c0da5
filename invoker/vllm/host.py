"""What a node needs to run vLLM servers: the interpreter, memory, and folders."""

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from invoker.engine.contract import UnsupportedModel
from invoker.host_tier.model_folders import ModelFolders
from invoker.vllm import check_args
from invoker.vllm.arguments import VllmSpec, server_environment
from invoker.vllm.model_infos import ModelInfos
from invoker.vllm.server import ServerFailed, VllmServer
from rdmacast.aio.shielded import run_shielded
from rdmacast.aio.threads import run_in_thread
from registry.images.adapters import CONFIG, FOLDER, adapters_of, rank_of
from registry.messages.images import ImageRef
from registry.messages.node import StartInstance

CHECK_TIMEOUT_S = 120.0
LEAST_BYTES = 4 << 30  # of one server: its interpreters, and a KV cache
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
        memory_bytes = self._reserve(name, image.nbytes)
        linked = "" if self.loads_arriving else image.image
        try:
            folder = await run_in_thread(self.folders.open, name, linked, request.assets)
            scratch = Path(await run_in_thread(tempfile.mkdtemp, "", "", self.scratch_dir))
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
            return await VllmServer.spawn(
                spec, on_log, lambda: self._infos.keep(scratch), lambda: self._release(name)
            )
        except BaseException:
            await run_in_thread(self._release, name)
            raise

    def _reserve(self, name: str, image_bytes: int) -> int:
        """Reserve the memory of a server; return its bytes. Raises ServerFailed."""
        used = sum(self._reserved.values())
        wanted = min(self.memory_bytes, max(LEAST_BYTES, IMAGE_SHARE * image_bytes))
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
        asked = json.dumps({"arguments": list(arguments), "architectures": names}).encode()
        scratch = Path(await run_in_thread(tempfile.mkdtemp, "", "", self.scratch_dir))
        spec = VllmSpec(
            python=self.python,
            folder=scratch,
            scratch=scratch,
            name="check",
            dtype="",
            context_length=0,
            max_sequences=1,
            device=self.device,
            memory_bytes=self.memory_bytes,
        )
        answer = await _run(self.python, (check_args.__file__,), asked, spec, CHECK_TIMEOUT_S)
        try:
            error = json.loads(answer.strip().splitlines()[-1])["error"]
        except (ValueError, IndexError, KeyError, TypeError):
            raise ServerFailed(f"{self.python} cannot check arguments of vLLM: see the node's log") from None
        if error:
            raise UnsupportedModel(f"vLLM: {str(error)[:_MAX_MESSAGE]}")


async def has_module(python: Path, name: str) -> bool:
    """Return whether the interpreter can be run and finds a module, which is not imported."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-I",
            "-c",
            _PROBE,
            name,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            return await process.wait() == 0
    except TimeoutError:
        return False
    finally:
        await run_shielded(_ended(process))


async def _run(
    python: Path, arguments: Sequence[str], given: bytes, spec: VllmSpec, timeout_s: float
) -> bytes:
    """Run the interpreter to its end; return what it printed. Raises ServerFailed."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            *arguments,
            cwd=spec.scratch,
            env=server_environment(spec, os.environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ServerFailed(f"{python} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            answer, errors = await process.communicate(given)
    except TimeoutError:
        raise ServerFailed(f"{python} did not check arguments within {timeout_s:g} s") from None
    finally:
        await run_shielded(_ended(process))
    if process.returncode:
        log.warning("%s: %s", python, errors.decode(errors="replace")[-2000:])
    return answer


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
