"""/ui: the console's files, which need no key: what they show does."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.core.errors import ApiError
from gateway.ui.files import PAGE, file_response, ui_files


class UiRoutes:
    """The handlers of the console's files."""

    async def page(self, request: Request) -> Response:
        """Return the page. Its references are relative, so that it works below any prefix of a proxy."""
        return file_response(ui_files()[PAGE], request)

    async def file(self, request: Request) -> Response:
        """Return one file. Raises ApiError (404)."""
        file = ui_files().get(request.path_params["file"])
        if file is None:
            raise ApiError(404, "not_found", "the console has no such file")
        return file_response(file, request)
