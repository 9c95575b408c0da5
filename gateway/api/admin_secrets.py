"""/admin/functions/{name}/secrets: set, list and delete a function's secrets; no answer has a value."""

import logging

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_json
from gateway.requests.services import Services
from gateway.schemas.admin import PutSecret
from gateway.schemas.answers import ReencryptedSecrets, SecretList, SecretView
from registry.errors import Conflict, NotFound
from registry.records.function import check_name
from registry.records.secret import SealedSecret

_log = logging.getLogger("hypercast.gateway")


class SecretAdmin:
    """The handlers of secrets."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._put = msgspec.json.Decoder(PutSecret)

    async def put(self, request: Request) -> SecretView:
        """Set or replace one; instances that start from now on have it."""
        name, key = request.path_params["name"], request.path_params["key"]
        payload = await read_json(request, self._services, self._put)
        secret = await self._services.vault.put(name, key, payload.value, self._services.clock)
        _log.info("set the secret %s of %s", key, name)
        return _view(secret)

    async def list_all(self, request: Request) -> SecretList:
        """List names, sizes and times."""
        known = await self._services.state.function_secrets(check_name(request.path_params["name"]))
        return SecretList(secrets=[_view(secret) for secret in known.secrets])

    async def delete(self, request: Request) -> SecretView:
        """Delete one that the current version does not need."""
        name, key = check_name(request.path_params["name"]), request.path_params["key"]
        try:
            current = await self._services.state.version(name)
        except NotFound:
            current = None
        if current is not None and key in current.secrets:
            message = f"version {current.version} of {name} needs {key}: deploy one without it first"
            raise Conflict(message)
        secret = await self._services.vault.delete(name, key)
        _log.info("deleted the secret %s of %s", key, name)
        return _view(secret)

    async def reencrypt(self, request: Request) -> ReencryptedSecrets:
        """Encrypt all secrets of all functions with the newest of the cluster's secrets."""
        done = await self._services.vault.reencrypt()
        return ReencryptedSecrets(reencrypted=done.reencrypted, unreadable=done.unreadable)


def _view(secret: SealedSecret) -> SecretView:
    return SecretView(key=secret.key, bytes=secret.nbytes, set_at=secret.set_at)
