"""Records with sensible values, for tests that care about one or two fields."""

from dataclasses import replace
from typing import Any

from registry.cast import CastMember, CastProgress, CastRecord, CastState
from registry.function import FunctionVersion, Task
from registry.instance import InstanceRecord, InstanceState, StartKind
from registry.node import Holding, NodeRecord, NodeState, Tier
from registry.usage import RequestRecord, RequestStatus

NOW = 1_700_000_000.25


def draft(name: str = "tiny", **changes: Any) -> FunctionVersion:
    record = FunctionVersion(
        function=name,
        version=0,
        task=Task.GENERATE,
        architecture="LlamaForCausalLM",
        image="a" * 64,
        manifest="b" * 64,
        image_bytes=1 << 20,
        blocks=16,
        dtype="bfloat16",
        context_length=512,
        assets={"config.json": "c" * 64},
        created_at=NOW,
    )
    return replace(record, **changes)


def node(node_id: str = "n0", epoch: int = 1, **changes: Any) -> NodeRecord:
    record = NodeRecord(
        id=node_id,
        host="h0",
        pid=1,
        epoch=epoch,
        state=NodeState.READY,
        device="cpu",
        gpu_type="cpu",
        gpu_count=1,
        channel="tcp://127.0.0.1:1",
        cast="tcp://127.0.0.1:2",
        gpu_bytes=1 << 30,
        gpu_free_bytes=1 << 29,
        host_bytes=1 << 31,
        host_free_bytes=1 << 30,
        reads_store=True,
        allows_handlers=False,
        link_rate_bytes_s=None,
        started_at=NOW,
        holdings=(Holding(image="a" * 64, tiers=(Tier.GPU, Tier.HOST), bytes=5, last_used_at=NOW),),
        counters={"disk_read_bytes": 3},
    )
    return replace(record, **changes)


def instance(instance_id: str = "i0", node_id: str = "n0", **changes: Any) -> InstanceRecord:
    record = InstanceRecord(
        instance_id=instance_id,
        function="tiny",
        version=1,
        node=node_id,
        state=InstanceState.LOADING,
        start_kind=StartKind.COLD,
        since=NOW,
        phases_ms={"fetch": 1.5},
    )
    return replace(record, **changes)


def cast(cast_id: str = "c0", **changes: Any) -> CastRecord:
    """Of a megabyte, from node n0 to n1 and n2."""
    members = tuple(
        CastMember(node=f"n{index}", host=f"h{index}", address=f"tcp://127.0.0.1:{index + 1}")
        for index in range(3)
    )
    record = CastRecord(
        cast_id=cast_id,
        image="a" * 64,
        function="tiny",
        version=1,
        nbytes=1 << 20,
        block_bytes=1 << 18,
        planner="binomial",
        reason="binomial, 4 blocks: 2 hops",
        members=members,
        sources=(0,),
        planned=3,
        started_at=NOW,
    )
    return replace(record, **changes)


def cast_progress(node_id: str = "n1", cast_id: str = "c0", **changes: Any) -> CastProgress:
    record = CastProgress(
        cast_id=cast_id,
        node=node_id,
        state=CastState.RUNNING,
        blocks=4,
        held=2,
        seconds=0.5,
        updated_at=NOW + 0.5,
        received={"tcp": 1 << 19},
        transports={"n0": "tcp: another host"},
    )
    return replace(record, **changes)


def request(request_id: str = "r0", **changes: Any) -> RequestRecord:
    record = RequestRecord(
        request_id=request_id,
        tenant="acme",
        key_id="k0",
        function="tiny",
        version=1,
        status=RequestStatus.OK,
        start_kind="hot",
        node="n0",
        gpu_type="cpu",
        gpu_count=1,
        received_at=NOW,
        started_at=NOW + 0.1,
        ended_at=NOW + 1,
        queue_ms=100,
        load_ms=0,
        exec_ms=900,
        billed_gpu_ms=900,
        prompt_tokens=7,
        completion_tokens=5,
        rate_id="cpu-001",
        cost_nanos=45_200,
    )
    return replace(record, **changes)
