"""What a node reports of its engines: queued prompts, sequences, seen rates; and when it reports it."""

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from invoker.engine.contract import TokenOutput
from invoker.engine.engine_load import EngineLoad
from invoker.instances.instance import Instance
from invoker.instances.load_feed import LoadFeed, matters_at_once
from registry.clock import SystemClock
from registry.messages.node import GetStatus, InstanceLoad, NodeLoads, NodeStatus
from tests.fixtures.fake_engine import StepGate
from tests.fixtures.invoker import PROMPT, generate, serving

LOAD = InstanceLoad(
    instance_id="i",
    function="f",
    version=1,
    queued_prompt_tokens=0,
    running=1,
    waiting=0,
    decode_tokens_s=80.0,
    prefill_tokens_s=20_000.0,
    decode_steps=((1, 0.012),),
    kv_used_tokens=0,
    kv_tokens=1000,
)


def output(name: str, work: int, *, token: int | None = None, reason: str = "") -> TokenOutput:
    return TokenOutput(request_id=name, token_id=token, logprob=None, finish_reason=reason, work=work)


def test_prompts_are_queued_until_run_and_the_rate_is_that_of_full_steps() -> None:
    load = EngineLoad()
    load.add("a", 700)
    load.add("b", 300)
    load.stepped([output("a", 512)], 0.025, 1.0)
    seen = load.reading(1.0)
    assert (seen.queued_prompt_tokens, seen.waiting, seen.running) == (488, 2, 0)
    assert round(seen.prefill_tokens_s) == 20480
    load.stepped([output("a", 188, token=5), output("b", 300, token=5)], 0.5, 1.5)  # slow, but not full
    seen = load.reading(1.5)
    assert (seen.queued_prompt_tokens, seen.waiting, seen.running) == (0, 0, 2)
    assert round(seen.prefill_tokens_s) == 20480
    load.stepped([output("a", 1, token=6), output("b", 1, token=6, reason="stop")], 0.02, 1.52)
    assert load.reading(1.52).decode_steps == ((2, 0.02),)
    assert load.reading(1.52).decode_tokens_s == 2.0
    load.remove("b")
    load.remove("unknown")
    assert load.reading(100.0).running == 1 and load.reading(100.0).decode_tokens_s < 1e-6


def rate_after(*prompts: tuple[int, float], decode_s: float = 0.01) -> float:
    """Return the prefill rate after prompts that each were run in one step, and a decode step."""
    load = EngineLoad()
    for number, (tokens, seconds) in enumerate(prompts):
        load.add(f"p{number}", tokens)
        load.stepped([output(f"p{number}", tokens, token=5)], seconds, 1.0)
    load.stepped([output("p0", 1, token=6)], decode_s, 2.0)
    return load.reading(2.0).prefill_tokens_s


def test_steps_that_hardly_run_a_prompt_show_no_rate() -> None:
    assert rate_after((1, 0.012)) == 0.0  # the rest was K and V that another instance had computed
    assert rate_after((30, 0.012)) == 0.0
    assert rate_after((1, 0.012), (512, 0.025)) == 20480
    assert rate_after((512, 0.025), (1, 0.012)) == 20480
    assert rate_after((512, 0.025), (256, 0.025)) == 20480  # a lower bound: the highest is nearest
    load = EngineLoad()
    load.add("a", 512)
    load.stepped([output("a", 512, token=5)], 0.025, 1.0)
    assert load.reading(1.0).prefill_tokens_s == 0.0  # unknown how much of that a decode step takes
    load.add("b", 1000)
    load.stepped([output("b", 512)], 0.05, 2.0)
    assert load.reading(2.0).prefill_tokens_s == 10240  # a full step counts in any case


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=40))
def test_counts_agree_whatever_is_added_run_and_removed(steps: list[tuple[str, int, bool]]) -> None:
    load, left = EngineLoad(), dict[str, int]()
    for name, tokens, removes in steps:
        if name not in left:
            load.add(name, tokens)
            left[name] = tokens
        elif removes:
            load.remove(name)
            del left[name]
        else:
            token = 1 if tokens >= left[name] else None
            load.stepped([output(name, tokens, token=token)], 0.01, 0.0)
            left[name] = 0 if token else max(1, left[name] - tokens)
        seen = load.reading(0.0)
        assert seen.queued_prompt_tokens == sum(left.values())
        assert (seen.waiting, seen.running) == (
            sum(map(bool, left.values())),
            sum(one == 0 for one in left.values()),
        )


def test_what_may_need_another_number_of_instances_is_reported_at_once() -> None:
    def urgent(**changes: object) -> bool:
        return matters_at_once({"i": LOAD}, {"i": replace_load(**changes)})

    def replace_load(**changes: object) -> InstanceLoad:
        fields = {name: getattr(LOAD, name) for name in LOAD.__struct_fields__}
        return InstanceLoad(**{**fields, **changes})  # type: ignore[arg-type]

    assert not urgent(decode_tokens_s=90.0, running=2, prefill_tokens_s=18_000.0)
    assert urgent(prefill_tokens_s=12_000.0) and urgent(kv_used_tokens=950)
    assert matters_at_once({}, {"i": LOAD})


async def test_loads_are_read_at_a_bounded_rate_however_many_steps_an_engine_runs() -> None:
    reads, feed, loop = list[float](), LoadFeed(SystemClock()), asyncio.get_running_loop()

    def instances() -> list[Instance]:
        reads.append(loop.time())
        return []

    following = asyncio.create_task(anext(feed.follow(instances)))
    begun_s = loop.time()
    while len(reads) < 4:
        feed.notify()
        await asyncio.sleep(0)
    took_s = loop.time() - begun_s
    following.cancel()
    await asyncio.wait([following])
    assert took_s >= 3 * 0.02 - 1e-3


async def test_a_node_reports_its_loads_while_the_call_stays_open(tmp_path: Path) -> None:
    gate = StepGate()
    async with serving(tmp_path, 4096, gate) as node:
        async with node.channel.call(GetStatus(follow=True)) as replies:
            assert isinstance(await anext(replies), NodeStatus)

            async def until(running: int, waiting: int) -> InstanceLoad:
                async for reply in replies:
                    assert isinstance(reply, NodeLoads)
                    (load,) = reply.loads
                    if (load.running, load.waiting) == (running, waiting):
                        return load
                raise AssertionError("the node ended the call")

            idle = await until(0, 0)
            assert (idle.instance_id, idle.prefill_tokens_s) == ("i1", 0.0)
            call = asyncio.create_task(node.ask(generate("i1", tokens=3)))
            gate.release()
            running = await until(1, 0)
            assert running.queued_prompt_tokens == 0
            gate.open()
            await call
            ended = await until(0, 0)
            assert ended.decode_tokens_s == 0.0 and ended.decode_steps[0][0] == 1
        assert len(await node.ask(GetStatus())) == 1 and len(PROMPT) > 0
