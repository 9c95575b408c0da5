"""K and V that stages put aside: how long they are kept, and that they come over links as they are."""

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
import torch

from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.export import KvExport, KvRange
from invoker.engine.kv.slices import KvSlice, empty_slice
from invoker.kv.choice import KvPolicy, PrefillRate
from invoker.kv.transfer import KvConnector
from invoker.links.export_buffer import KvExportBuffer
from invoker.links.framing import LinkLost
from invoker.links.kv_link import KV_FRAMES, KvHeader, receive_kv, send_kv
from invoker.links.link import KEY_FRAMES, SERVICE, StageKey
from invoker.links.listener import StageListener
from rdmacast.address import parse_url
from rdmacast.protocol.handshake import ClientHandshake, Secret
from rdmacast.protocol.tls import NodeTls
from registry.messages.live import KvStage
from tests.fixtures.patience import PATIENCE_S, until

SHAPE = KvShape(layers=6, heads=2, head_dim=8, dtype=torch.bfloat16)
SECRET = b"a secret of the tests, long enough"


def key(sequence: str = "7", place: int = 0) -> StageKey:
    return StageKey(pipeline="p", epoch=1, place=place, sequence=sequence)


def some_kv(tokens: int = 40, first: int = 2, last: int = 5, seed: int = 0) -> KvSlice:
    one = empty_slice(SHAPE, first, last, tokens)
    one.data.copy_(torch.randn(one.data.shape, generator=torch.Generator().manual_seed(seed)))
    return one


def whole(tokens: int = 40, first: int = 2, last: int = 5, seed: int = 0) -> KvExport:
    return KvExport.whole(some_kv(tokens, first, last, seed))


def same(one: KvSlice, other: KvSlice) -> bool:
    return (one.first, one.last) == (other.first, other.last) and torch.equal(one.data, other.data)


def over_a_link(give: Callable[[socket.socket], None], layers: tuple[int, int], most: int) -> KvSlice:
    giving, taking = socket.socketpair()
    with taking:

        def run() -> None:
            with giving:
                give(giving)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            return receive_kv(taking, SHAPE, layers, most, PATIENCE_S)
        finally:
            taking.close()
            thread.join()


@pytest.mark.parametrize("tokens", [1, 40, 20_000])
def test_a_slice_comes_as_it_is(tokens: int) -> None:
    one = some_kv(tokens)
    assert one.nbytes == 3 * 4 * tokens * 8 * 2
    assert same(over_a_link(lambda to: send_kv(to, KvExport.whole(one), PATIENCE_S), (2, 5), tokens), one)


@pytest.mark.parametrize(
    ("layers", "most", "text"),
    [((2, 4), 40, "40 tokens of layers"), ((2, 5), 39, "40 tokens of layers")],
)
def test_what_was_not_asked_for_is_not_taken(layers: tuple[int, int], most: int, text: str) -> None:
    def give(to: socket.socket) -> None:
        try:
            send_kv(to, whole(), PATIENCE_S)
        except OSError:
            pass  # nobody reads it

    with pytest.raises(LinkLost, match=text):
        over_a_link(give, layers, most)


def test_another_models_kv_and_an_early_end_are_refused() -> None:
    narrow = KvSlice(first=2, last=5, data=some_kv().data[..., :4].contiguous())

    def other(to: socket.socket) -> None:
        try:
            send_kv(to, KvExport.whole(narrow), PATIENCE_S)
        except OSError:
            pass

    with pytest.raises(LinkLost, match="bytes of K and V, expected"):
        over_a_link(other, (2, 5), 40)
    with pytest.raises(LinkLost, match="closed the connection"):
        over_a_link(lambda to: to.sendall(b"\1\0"), (2, 5), 40)


async def test_what_is_put_aside_is_taken_once_before_or_after() -> None:
    exports, one = KvExportBuffer(), whole()
    exports.add(key(), one)
    assert exports.nbytes == one.nbytes
    assert await exports.pop(key(), PATIENCE_S) is one
    assert await exports.pop(key(), 0.0) is None

    async def ask_after_another() -> None:
        assert await exports.pop(key(), PATIENCE_S) is None
        exports.add(key(), one)

    taken, _ = await asyncio.gather(exports.pop(key(), PATIENCE_S), ask_after_another())
    assert taken is one
    assert exports.nbytes == 0


async def test_a_stage_at_work_is_asked_for_what_is_not_there_yet() -> None:
    exports, one, asked = KvExportBuffer(), whole(), list[str]()

    def ask(sequence: str) -> None:
        asked.append(sequence)
        exports.add(key(sequence), one)

    with exports.on_request(key(sequence=""), ask):
        exports.add(key("6"), one)
        assert await exports.pop(key("6"), 0.0) is one
        assert await exports.pop(key("7"), PATIENCE_S) is one
        assert await exports.pop(key("7", place=1), 0.0) is None  # another stage's
    assert await exports.pop(key("8"), 0.0) is None
    assert asked == ["7"]


async def test_a_shelf_keeps_so_much_for_so_long() -> None:
    one = whole()
    exports = KvExportBuffer(max_bytes=2 * one.nbytes)
    for number in range(3):
        exports.add(key(str(number)), one)
    assert exports.nbytes == 2 * one.nbytes
    assert await exports.pop(key("0"), 0.0) is None
    assert await exports.pop(key("2"), 0.0) is one
    exports.clear()
    assert exports.nbytes == 0
    brief = KvExportBuffer(keep_s=0.0)
    brief.add(key(), one)
    expired = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, expired.set)  # due after what was due before
    await expired.wait()
    assert brief.nbytes == 0


def listener(host: str, secret: Secret = SECRET) -> StageListener:
    return StageListener("127.0.0.1", 0, "127.0.0.1", host, secret, NodeTls())


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")], ids=["tcp", "unix"])
async def test_a_door_gives_what_lies_on_its_shelf(hosts: tuple[str, str]) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), listener(hosts[0]) as here, listener(hosts[1]) as there:
        one, late, own = some_kv(), some_kv(seed=1), some_kv(seed=2)
        there.exports.add(key(), KvExport.whole(one))

        def fetch(sequence: str, url: str, host: str) -> "asyncio.Task[KvSlice]":
            stage = KvStage(link=url, host=host, first=2, last=5)
            work = here.fetch_kv(stage, key(sequence), SHAPE, 40, PATIENCE_S)
            return asyncio.create_task(work)

        assert same(await fetch("7", there.url, there.host), one)
        waiting = fetch("8", there.url, there.host)  # asked for before it is there
        there.exports.add(key("8"), KvExport.whole(late))
        assert same(await waiting, late)
        here.exports.add(key("9"), KvExport.whole(own))
        assert await fetch("9", here.url, here.host) is own
        with pytest.raises(LinkLost):
            await fetch("7", "tcp://127.0.0.1:1", "c")


async def test_a_sequence_moves_from_an_instance_to_another_node() -> None:
    async with asyncio.timeout(2 * PATIENCE_S), listener("a") as here, listener("b") as there:
        source, target = KvConnector(there, KvPolicy.ALWAYS), KvConnector(here, KvPolicy.ALWAYS)
        one = some_kv(first=0, last=SHAPE.layers)
        await asyncio.to_thread(source.exporter("i1"), "r", KvExport.whole(one))
        at = source.location("i1", SHAPE.layers, "r")
        (found,) = await target.load("r", 41, at, SHAPE, PrefillRate())
        assert same(found, one) and target.loaded_tokens == one.tokens
        assert there.exports.nbytes == 0


def fill(export: KvExport, one: KvSlice, step: int) -> None:
    """Export a slice as an engine does: some tokens after the other, each in all layers."""
    for start in range(0, one.tokens, step):
        for layer in range(one.first, one.last):
            export.write(layer, start, one.data[layer - one.first, :, start : start + step])


@pytest.mark.parametrize("step", [1, 16, 40])
def test_an_export_under_way_comes_as_it_is(step: int) -> None:
    one = some_kv(first=0, last=SHAPE.layers)
    export = KvExport.empty(SHAPE, 40)

    def give(to: socket.socket) -> None:
        filling = threading.Thread(target=fill, args=(export, one, step))
        filling.start()
        send_kv(to, export, PATIENCE_S)
        filling.join()

    assert same(over_a_link(give, (0, SHAPE.layers), 40), one)


def test_an_export_that_fails_is_not_received() -> None:
    export = KvExport.empty(SHAPE, 40)
    export.write(0, 0, some_kv(first=0, last=1).data[0])

    def give(to: socket.socket) -> None:
        failing = threading.Thread(target=export.fail, args=("the sequence has ended",))
        failing.start()
        with pytest.raises(BrokenPipeError, match="the sequence has ended"):
            send_kv(to, export, PATIENCE_S)
        failing.join()

    with pytest.raises(LinkLost, match="closed the connection"):
        over_a_link(give, (0, SHAPE.layers), 40)


def test_parts_out_of_turn_are_refused() -> None:
    def give(*parts: KvRange) -> Callable[[socket.socket], None]:
        def send(to: socket.socket) -> None:
            to.sendall(KV_FRAMES.encode(KvHeader(40, 0, SHAPE.layers)))
            for part in parts:
                nbytes = (part.last - part.first) * 4 * (part.end - part.start) * 8 * 2
                to.sendall(bytes(KV_FRAMES.encode(part, nbytes)) + bytes(nbytes))

        return send

    first = KvRange(0, 3, 0, 10)
    wrong = [
        (first, first),
        (first, KvRange(0, 4, 10, 20)),
        (KvRange(-1, 2, 0, 10),),
        (KvRange(0, 7, 0, 10),),
        (KvRange(0, 1, 0, 41),),
        (KvRange(0, 1, 5, 10),),
        (KvRange(2, 2, 0, 10),),
    ]
    for parts in wrong:
        with pytest.raises(LinkLost, match="do not come next"):
            over_a_link(give(*parts), (0, SHAPE.layers), 40)


def test_an_export_ignores_what_it_has_and_what_does_not_follow() -> None:
    one, export = some_kv(first=0, last=SHAPE.layers), KvExport.empty(SHAPE, 40)
    other = some_kv(first=0, last=SHAPE.layers, seed=1)
    export.write(0, 10, one.data[0, :, 10:])
    export.write(0, 0, one.data[0, :, :20])
    export.write(0, 0, other.data[0, :, :20])
    assert next(export.arriving(0.0)) == KvRange(0, 1, 0, 20)
    fill(export, one, 40)
    export.fail("too late")
    assert same(export.wait(0.0), one) and not export.is_under_way
    with pytest.raises(TimeoutError):
        KvExport.empty(SHAPE, 40).wait(0.0)


async def test_k_and_v_come_while_the_prompt_runs() -> None:
    async with asyncio.timeout(2 * PATIENCE_S), listener("a") as here, listener("b") as there:
        source, target = KvConnector(there, KvPolicy.ALWAYS), KvConnector(here, KvPolicy.ALWAYS)
        one, export = some_kv(first=0, last=SHAPE.layers), KvExport.empty(SHAPE, 40)
        source.exporter("i1")("r", export)
        at = source.location("i1", SHAPE.layers, "r")
        target.prefetch(at, 40, SHAPE)
        target.prefetch(at, 40, SHAPE)
        await until(lambda: there.exports.nbytes == 0)  # it is being sent
        await asyncio.to_thread(fill, export, one, 16)
        (found,) = await target.load("r", 41, at, SHAPE, PrefillRate())
        assert same(found, one) and target.loaded_tokens == one.tokens


async def test_a_prompt_that_does_not_end_well_is_run_again() -> None:
    async with asyncio.timeout(2 * PATIENCE_S), listener("a") as here, listener("b") as there:
        source, target = KvConnector(there, KvPolicy.ALWAYS), KvConnector(here, KvPolicy.ALWAYS)
        export = KvExport.empty(SHAPE, 40)
        source.exporter("i1")("r", export)
        at = source.location("i1", SHAPE.layers, "r")
        target.prefetch(at, 40, SHAPE)
        await until(lambda: there.exports.nbytes == 0)
        export.fail("the sequence has ended")
        assert await target.load("r", 41, at, SHAPE, PrefillRate()) == ()
        target.prefetch(at, 40, SHAPE)  # which nobody exports
        await target.aclose()


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")], ids=["tcp", "unix"])
async def test_links_follow_a_rotation_of_the_secret(hosts: tuple[str, str]) -> None:
    new, one = b"another secret of the tests", some_kv()
    held = [(SECRET,), (SECRET,)]

    async def fetched() -> bool:
        there.exports.add(key(), KvExport.whole(one))
        stage = KvStage(link=there.url, host=there.host, first=2, last=5)
        return same(await here.fetch_kv(stage, key(), SHAPE, 40, PATIENCE_S), one)

    async with (
        asyncio.timeout(2 * PATIENCE_S),
        listener(hosts[0], lambda: held[0]) as here,
        listener(hosts[1], lambda: held[1]) as there,
    ):
        for secrets in ((new, SECRET), (new,)):
            for end in (0, 1):
                held[end] = secrets
                assert await fetched()
        held[0] = (SECRET,)
        with pytest.raises(LinkLost, match="secret"):
            await fetched()


def knock(url: str, wanted: StageKey) -> socket.socket:
    """Return the link of a peer that waits for exported K and V."""
    endpoint, handshake = parse_url(url), ClientHandshake(SECRET, SERVICE)
    link = socket.create_connection((endpoint.host, endpoint.port), PATIENCE_S)
    link.sendall(handshake.opening)
    while needed := handshake.needed:
        link.sendall(handshake.receive(link.recv(needed, socket.MSG_WAITALL)))
    link.sendall(KEY_FRAMES.encode(wanted))
    return link


async def test_who_hangs_up_is_in_nobodys_way() -> None:
    async with asyncio.timeout(2 * PATIENCE_S), listener("a") as here, listener("b") as there:
        link = await asyncio.to_thread(knock, there.url, key())
        await until(lambda: "1 waiters" in repr(there.exports))
        link.close()
        await until(lambda: "0 waiters" in repr(there.exports))
        one = some_kv()
        there.exports.add(key(), KvExport.whole(one))
        stage = KvStage(link=there.url, host=there.host, first=2, last=5)
        assert same(await here.fetch_kv(stage, key(), SHAPE, 40, PATIENCE_S), one)
