"""A user's handler in a process of its own: what it may do, and what happens when it misbehaves."""

import asyncio
import json
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from invoker.handlers.errors import BadHandler, HandlerCrashed, HandlerRaised, HandlerTimeout, OutputTooLarge
from invoker.handlers.files import make_folder, relative_path
from invoker.handlers.landlock import landlock_version
from invoker.handlers.process import HandlerProcess, handler_spec
from registry.config.function_yaml import load_function_yaml
from registry.config.handler_spec import HandlerLimits, HandlerSpec
from tests.fixtures.handler import call, files_in, started
from tests.fixtures.loops import UVLOOP, Backend, on_both_loops
from tests.fixtures.patience import PATIENCE_S, until

MIB = 1024**2
FUNCTIONS = Path(__file__).resolve().parents[3] / "functions"


@pytest.fixture
def anyio_backend() -> Backend:
    return UVLOOP  # as a node runs on


@on_both_loops
async def test_plain_async_and_generator_handlers(tmp_path: Path) -> None:
    source = """
import asyncio

def plain(x): return {"plain": x}
async def coroutine(x):
    await asyncio.sleep(0)
    return {"async": x}
def generator(x):
    yield from range(x)
async def async_generator(x):
    for i in range(x):
        await asyncio.sleep(0)
        yield i
def handle(request):
    return globals()[request["kind"]](request["x"])
"""
    async with started(tmp_path, source) as process:
        assert await call(process, {"kind": "plain", "x": "ä"}) == [{"plain": "ä"}]
        assert await call(process, {"kind": "coroutine", "x": 1}) == [{"async": 1}]
        assert await call(process, {"kind": "generator", "x": 3}) == [0, 1, 2]
        assert await call(process, {"kind": "async_generator", "x": 3}) == [0, 1, 2]
        many = await asyncio.gather(*(call(process, {"kind": "plain", "x": i}) for i in range(50)))
        assert many == [[{"plain": i}] for i in range(50)]


async def test_echo_function_streams_when_asked(tmp_path: Path) -> None:
    spec = load_function_yaml(FUNCTIONS / "echo").handler
    assert spec is not None
    process = HandlerProcess(lambda line: None)
    files = {path.name: path.read_bytes() for path in (FUNCTIONS / "echo").iterdir() if path.is_file()}
    assert handler_spec(files) == spec
    await process.start(files, spec, tmp_path)
    try:
        assert await call(process, {"a": [1, None]}) == [{"a": [1, None]}]
        parts = []
        body = json.dumps({"stream": True, "message": "to be or not"}).encode()
        async for output in process.invoke("r", body, 10):
            assert output.stream
            parts.append(json.loads(output.data)["text"])
        assert parts == ["to ", "be ", "or ", "not"]
    finally:
        await process.aclose()


async def test_a_stream_arrives_while_the_handler_still_runs(tmp_path: Path) -> None:
    source = """
import pathlib
def handle(go):
    yield "first"
    while not pathlib.Path("go").exists():
        pass
    yield "second"
"""
    async with started(tmp_path, source) as process:
        (folder,) = (tmp_path / "scratch").iterdir()
        outputs = process.invoke("r", b"", 20)
        assert json.loads((await anext(outputs)).data) == "first"
        (folder / "go").touch()
        assert json.loads((await anext(outputs)).data) == "second"
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)


async def test_secrets_of_the_node_stay_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERCAST_CLUSTER_SECRET", "do-not-tell")
    secret = tmp_path / "cluster.secret"
    secret.write_text("do-not-tell")
    source = """
import glob, os, pathlib
def attempt(read):
    try: return read()
    except OSError as error: return type(error).__name__
def descriptors():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.lexists(path)]
def handle(request):
    parent = f"/proc/{os.getppid()}"
    status = open("/proc/self/status").readlines()
    node = request["node"]
    return {
        "environment": dict(os.environ),
        "parent": attempt(lambda: pathlib.Path(parent, "environ").read_text()),
        "memory": attempt(lambda: open(parent + "/mem", "rb").read(1)),
        "node": attempt(lambda: pathlib.Path(f"/proc/{node}/cmdline").read_text()),
        "sockets": attempt(lambda: pathlib.Path("/proc/net/unix").read_text()),
        "file": attempt(lambda: pathlib.Path(request["secret"]).read_text()),
        "write": attempt(lambda: pathlib.Path(request["secret"]).write_text("x")),
        "kill": attempt(lambda: os.kill(os.getppid(), 0)),
        "kill_node": attempt(lambda: os.kill(node, 0)),
        "descriptors": descriptors(),
        "session": os.getsid(0) == os.getpid(),
        "core": __import__("resource").getrlimit(__import__("resource").RLIMIT_CORE),
        "privileges": [line for line in status if line.startswith(("CapEff", "NoNewPrivs"))],
        "own": attempt(lambda: pathlib.Path("mine").write_text("x")),
        "temporary": attempt(lambda: __import__("tempfile").mkdtemp()),
    }
"""
    open_file = os.open(secret, os.O_RDONLY)
    os.set_inheritable(open_file, True)
    async with started(tmp_path, source, env={"GREETING": "hello"}) as process:
        (answer,) = await call(process, {"secret": str(secret), "node": os.getpid()})
        assert isinstance(answer, dict)
        environment = answer["environment"]
        assert environment["GREETING"] == "hello"
        assert not [name for name in environment if name.startswith("HYPERCAST")]
        assert "do-not-tell" not in json.dumps(answer)
        assert answer["parent"] == answer["memory"] == "PermissionError"
        assert answer["own"] == 1 and str(tmp_path) in answer["temporary"]
        assert answer["session"] and answer["core"] == [0, 0]
        # the standard streams, its loop's three, and its end of the one socket pair
        assert len(answer["descriptors"]) == 7 and str(secret) not in answer["descriptors"]
        values = dict(line.split() for line in answer["privileges"])
        assert values["NoNewPrivs:"] == "1" and int(values["CapEff:"], 16) == 0
        if landlock_version() >= 1:
            assert answer["file"] == answer["write"] == "PermissionError"
            assert answer["node"] == answer["sockets"] == "PermissionError"
        assert answer["kill"] == answer["kill_node"] == "PermissionError"
    os.close(open_file)
    assert secret.read_text() == "do-not-tell"


async def test_a_memory_hog_is_stopped_and_the_next_call_works(tmp_path: Path) -> None:
    source = """
hoard = []
def handle(mib):
    for _ in range(mib):
        hoard.append(bytearray(1 << 20))
    return len(hoard)
"""
    async with started(
        tmp_path, source, limits=HandlerLimits(memory_bytes=64 * MIB, timeout_s=PATIENCE_S)
    ) as process:
        pid = process.pid
        with pytest.raises(HandlerRaised, match=r"limits\.memory"):
            await call(process, 4000)
        assert await call(process, 3) == [3]
        assert process.pid != pid


async def test_an_infinite_loop_times_out_and_the_next_call_works(tmp_path: Path) -> None:
    source = """
def handle(forever):
    while forever: pass
    return "done"
"""
    async with started(tmp_path, source) as process:
        pid = process.pid
        with pytest.raises(HandlerTimeout, match=r"0\.3 s"):
            await call(process, True, timeout_s=0.3)
        assert await call(process, False) == ["done"]
        assert process.pid != pid


async def test_a_slow_async_call_times_out_alone(tmp_path: Path) -> None:
    source = """
import asyncio
go = asyncio.Event()
async def handle(order):
    if order == "go":
        go.set()
    await (asyncio.Event() if order == "hang" else go).wait()
    return order
"""
    async with started(tmp_path, source) as process:
        pid = process.pid
        other = asyncio.create_task(call(process, "wait"))
        with pytest.raises(HandlerTimeout):
            await call(process, "hang", timeout_s=0.1)
        assert await call(process, "go") == ["go"]
        assert await other == ["wait"]
        assert process.pid == pid


async def test_processor_time_is_limited(tmp_path: Path) -> None:
    source = """
def handle(request):
    while True: pass
"""
    async with started(tmp_path, source, limits=HandlerLimits(cpu_s=1, timeout_s=PATIENCE_S)) as process:
        with pytest.raises(HandlerCrashed, match="processor time"):
            await call(process, None)


@pytest.mark.parametrize("big", ["return 'x' * 2_000_000", "return ('x' * 1000 for _ in range(2000))"])
async def test_huge_output_is_refused(tmp_path: Path, big: str) -> None:
    source = f"def handle(request):\n    if request == 1: return 1\n    {big}\n"
    async with started(
        tmp_path, source, limits=HandlerLimits(output_bytes=MIB, timeout_s=PATIENCE_S)
    ) as process:
        with pytest.raises(OutputTooLarge, match="1048576"):
            await call(process, 2)
        assert await call(process, 1) == [1]


async def test_a_child_that_writes_its_own_frames_is_killed(tmp_path: Path) -> None:
    source = """
import os
def handle(request):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                os.write(fd, b"\\xff" * 64)
        except OSError: pass
"""
    async with started(tmp_path, source) as process:
        with pytest.raises(HandlerCrashed, match="protocol"):
            await call(process, None)


async def test_an_exception_comes_back_and_its_traceback_is_logged(tmp_path: Path) -> None:
    source = """
def handle(request):
    return inner(request)
def inner(request):
    raise KeyError("no such thing")
"""
    logs: list[str] = []
    async with started(tmp_path, source, logs=logs) as process:
        pid = process.pid
        with pytest.raises(HandlerRaised) as raised:
            await call(process, {})
        assert str(raised.value) == "KeyError: 'no such thing'"
        await until(lambda: "KeyError: 'no such thing'" in logs)
        assert logs[0] == "request r1 failed:"
        assert "in inner" in "".join(logs) and "child.py" not in "".join(logs)
        assert raised.value.code == "handler_error"
        assert process.pid == pid


@pytest.mark.parametrize("value", ["object()", "float('nan')", "b'bytes'"])
async def test_a_result_that_is_not_json_is_an_error(tmp_path: Path, value: str) -> None:
    async with started(tmp_path, f"def handle(request): return {value}") as process:
        with pytest.raises(HandlerRaised, match="not JSON"):
            await call(process, None)


async def test_a_body_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    async with started(tmp_path, "def handle(request): return 1") as process:
        with pytest.raises(HandlerRaised, match="body is not JSON"):
            await anext(process.invoke("r", b"{", 10))


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("import no_such_module", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("def handle(request) return 1", "SyntaxError", "SyntaxError"),
        ("def other(request): return 1", "AttributeError", "no function handle"),
        ("raise SystemExit(4)", "SystemExit", "SystemExit: 4"),
        ("print('bye')\nimport os\nos._exit(5)", "ended while loading", "bye"),
        ("while True: pass", "did not load within", ""),
    ],
)
async def test_a_handler_that_does_not_load_says_why_in_its_log(
    tmp_path: Path, source: str, message: str, line: str
) -> None:
    limit = 0.5 if "while" in source else PATIENCE_S
    logs: list[str] = []
    process = HandlerProcess(logs.append, load_timeout_s=limit)
    with pytest.raises(BadHandler, match=message) as raised:
        await process.start(
            {"handler.py": source.encode()}, HandlerSpec(file="handler.py", function="handle"), tmp_path
        )
    assert raised.value.code == "start_failed"
    assert line in "\n".join(logs)
    assert not line or line == message or line not in str(raised.value)
    await process.aclose()
    assert not files_in(tmp_path)


async def test_neighbouring_files_are_importable_and_readable(tmp_path: Path) -> None:
    source = """
import pathlib
from parts.helper import double
def handle(x):
    return [double(x), pathlib.Path("data.txt").read_text()]
"""
    files = {"parts/helper.py": b"def double(x): return 2 * x", "data.txt": b"data"}
    async with started(tmp_path, source, files=files) as process:
        assert await call(process, 4) == [[8, "data"]]


@pytest.mark.parametrize("name", ["../out.py", "/etc/x", "a/../../b", "", ".", "a\0b", "a\\..\\b"])
def test_file_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadHandler, match="bad file name"):
        relative_path(name)
    with pytest.raises(BadHandler):
        make_folder(tmp_path, {"good": b"", name: b""})
    assert list(tmp_path.iterdir()) == []


async def test_a_caller_that_leaves_cancels_its_call(tmp_path: Path) -> None:
    source = """
import asyncio
ended = []
async def handle(request):
    if request == "ended":
        return ended
    return stream()
async def stream():
    try:
        yield 1
        await asyncio.Event().wait()
    finally:
        ended.append("yes")
"""
    async with started(tmp_path, source) as process:
        async with aclosing(process.invoke("r", b"1", 20)) as outputs:
            await anext(outputs)
        while await call(process, "ended") != [["yes"]]:
            pass
