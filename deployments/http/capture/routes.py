"""GET /captures/ID: a stored request, for the API key that sent it."""

from starlette.requests import Request
from starlette.responses import Response

from deployments.http import answer_schemas
from deployments.http.capture.folder import CaptureFolder
from deployments.http.request_id import clean_request_id
from deployments.http.routing import ApiRoute


def capture_route(folder: CaptureFolder) -> ApiRoute:
    async def capture(request: Request) -> Response:
        owner = request.scope["state"].get("owner", "")
        content = await folder.read(owner, clean_request_id(request.path_params["request_id"]))
        return Response(content, media_type="application/json")

    return ApiRoute(
        "/captures/{request_id}",
        capture,
        tag="operation",
        summary="Capture",
        description="The request with this X-Request-ID, which was sent with `X-Capture: 1` and the same API key.",
        answer=answer_schemas.CAPTURE,
        statuses=(404,),
    )
