"""/admin/functions/{name}/rollout: begin, change, show, promote and abort a rollout."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request

from gateway.api.bodies import managed_function, read_json
from gateway.core.contract import RolloutHealth
from gateway.core.errors import ApiError
from gateway.core.ids import new_request_id
from gateway.requests.services import Services
from gateway.schemas.admin import RolloutRequest
from gateway.schemas.answers import RolloutTraffic, RolloutView
from registry.errors import Conflict, NotFound
from registry.records.change import CallTraffic
from registry.records.function import Function, FunctionVersion
from registry.records.rollout import RolloutState
from registry.records.rollout_changes import begin_rollout, end_rollout


class RolloutAdmin:
    """The handlers of rollouts."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._request = msgspec.json.Decoder(RolloutRequest)

    async def begin(self, request: Request) -> RolloutView:
        """Begin a rollout, or change the active one of the same version."""
        function = await managed_function(request, self._services)
        payload = await read_json(request, self._services, self._request, absent=b"{}")
        plan, state = payload.plan(), self._services.state
        version = await state.version(function.name, plan.candidate)
        _check_task(await state.version(function.name, function.current), version)
        await self._check_secrets(version)
        await self._services.cluster.ensure_host_copy(version)
        id_, at = new_request_id().replace("req-", "rollout-"), self._services.clock.wall_s()
        head = await self._change(function, lambda head: begin_rollout(head, plan, id_=id_, at=at))
        if payload.wait and head.rollout is not None:
            await self._services.cluster.rollout_started(function.name, head.rollout.id)
            head = await state.function(function.name)
        return self._view(head)

    async def show(self, request: Request) -> RolloutView:
        """Show the last rollout."""
        return self._view(await managed_function(request, self._services))

    async def promote(self, request: Request) -> RolloutView:
        """Make the candidate current."""
        return self._view(await self._end(request, RolloutState.PROMOTED))

    async def abort(self, request: Request) -> RolloutView:
        """Let all requests go to the stable version again."""
        return self._view(await self._end(request, RolloutState.ABORTED))

    async def _end(self, request: Request, state: RolloutState) -> Function:
        function, at = await managed_function(request, self._services), self._services.clock.wall_s()
        rollout = function.active_rollout
        if rollout is None:
            raise Conflict(f"{function.name} has no rollout in progress")
        return await self._change(
            function, lambda head: end_rollout(head, rollout.id, state, "by an operator", at=at)
        )

    async def _change(self, function: Function, step: Callable[[Function], Function]) -> Function:
        head = await self._services.state.change_rollout(function.name, step)
        if head.current != function.current:
            version = await self._services.state.version(head.name, head.current)
            self._services.functions.set_current(head, version)
        return head

    async def _check_secrets(self, version: FunctionVersion) -> None:
        try:
            await self._services.vault.values(version.function, version.secrets)
        except NotFound as error:
            raise ApiError(422, "secret_missing", str(error), param="to") from error

    def _view(self, head: Function) -> RolloutView:
        rollout = head.rollout
        if rollout is None:
            raise NotFound(f"{head.name} had no rollout")
        health = self._services.cluster.rollout_health(head.name) if rollout.is_active else RolloutHealth()
        plan, traffic = rollout.plan, list[RolloutTraffic]()
        if rollout.is_active:
            traffic = [_traffic(plan.candidate, health.candidate), _traffic(rollout.stable, health.stable)]
        return RolloutView(
            name=head.name,
            id=rollout.id,
            state=rollout.state,
            candidate=plan.candidate,
            stable=rollout.stable,
            percent=plan.percent,
            shadow_percent=plan.shadow_percent,
            steps=plan.steps,
            step_s=plan.step_s,
            limits=plan.limits,
            started_at=rollout.started_at,
            since=rollout.since,
            reason=rollout.reason,
            ready=health.ready,
            traffic=traffic,
        )


def _check_task(stable: FunctionVersion, candidate: FunctionVersion) -> None:
    """Refuse a version that answers other requests than the current one."""
    if candidate.task is not stable.task:
        raise Conflict(
            f"version {candidate.version} of {candidate.function} has the task {candidate.task}, "
            f"the current one {stable.task}: requests for one cannot go to the other"
        )


def _traffic(version: int, counts: CallTraffic) -> RolloutTraffic:
    ttft_ms = counts.first_token_s / counts.first_tokens * 1000 if counts.first_tokens else None
    return RolloutTraffic(
        version=version,
        requests=counts.requests,
        ended=counts.ended,
        errors=counts.errors,
        ttft_ms=None if ttft_ms is None else round(ttft_ms, 1),
    )
