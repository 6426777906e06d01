"""The light picker over HTTP: Envoy's ext_authz filter with `http_service`, at about half the CPU of gRPC (ADR 47).

What HTTP cannot say: settings by route other than by header, headers to remove, and refusals with 5xx, which Envoy
takes for our own failure.
"""

from functools import partial
from typing import Final

from aiohttp import web
from headway_openai.errors import ApiError

from headway_scheduler.envoy.head import head_of
from headway_scheduler.envoy.light import CHECK, OBSERVATION, RESERVATION, LightPicker
from headway_scheduler.envoy.plane import UserKeys, plane_of
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.faults import unexpected
from headway_scheduler.rpc.calls import UnaryCalls
from headway_scheduler.rpc.http_door import HttpDoor, deliver
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.json_api import timeout_s

__all__ = ["LightHttp"]

_PREFIX: Final = "/ext_authz"
_BODY_BYTES: Final = "x-headway-body-bytes"
"""The whole body's length, where Envoy sends its beginning only: its own content-length is the part's then."""


class LightHttp:
    """Answers `/ext_authz/…`: 200 with the headers to give to the request, or the refusal for its client."""

    def __init__(self, picker: LightPicker, calls: UnaryCalls, door: HttpDoor) -> None:
        self._picker, self._calls, self._door = picker, calls, door

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Serve it there."""
        router.add_route("*", f"{_PREFIX}/{{path:.*}}", self._check)

    async def _check(self, request: web.Request) -> web.StreamResponse:
        try:
            principal = self._door.admit(request, CHECK, relayed=True)
            values = {name.lower(): value for name, value in request.headers.items()}
            plane = plane_of(values.items())
            if plane.user_keys is not UserKeys.NO:
                raise InvalidField("x-headway-user-keys", "over HTTP the authorization is the plane's own")
            values[":path"] = request.raw_path[len(_PREFIX) :]
            values["content-length"] = values.get(_BODY_BYTES, values.get("content-length", ""))
            raw = await self._door.read(request)
            pick = await self._picker.pick(principal, plane, head_of(values), request.method, raw, timeout_s(request))
        except ApiError as error:
            return _refused(error)
        except HeadwayError as error:
            return _refused(api_error(error))
        except web.HTTPException:
            raise
        except Exception as error:
            return _refused(api_error(unexpected(error, method=CHECK)))
        headers = {**pick.headers, **pick.answer_headers}
        if pick.observation:
            headers[OBSERVATION] = pick.observation
        if pick.decision is None:
            return web.Response(headers=headers)
        headers[RESERVATION] = pick.decision.reservation_id
        give_back = partial(self._calls.give_back, pick.decision.reservation_id, principal)
        return await deliver(request, web.Response(headers=headers), give_back)


def _refused(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=error.headers()
    )
