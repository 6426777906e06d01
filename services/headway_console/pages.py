"""Pages from templates, with the headers that every answer carries."""

import asyncio
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from typing import Any, Final

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from xxhash import xxh3_64_hexdigest

from headway_console import charts, heatmap
from headway_console.doorkeeper import COOKIE, CSRF_FIELD, Visit
from headway_console.formats import FILTERS

__all__ = ["PREFIX", "Pages", "harden", "see_other", "static_file"]

PREFIX: Final = "/console"
THEME_COOKIE: Final = "headway_theme"
_THEMES: Final = frozenset({"light", "dark"})
_AT_ONCE: Final = 1_000
"""Pieces of a page written in one turn of the event loop: about a millisecond."""
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES: Final = {
    "console.css": "text/css",
    "console.js": "text/javascript",
    "favicon.svg": "image/svg+xml",
}


def harden(response: web.StreamResponse) -> None:
    """Add what every answer of the console carries. Nothing of it is kept in a cache unless it says so itself."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")


def see_other(path: str) -> web.Response:
    """After a write: a page to go to."""
    return web.Response(status=303, headers={"Location": path})


@lru_cache
def _static(name: str) -> tuple[bytes, str]:
    content = files("headway_console").joinpath("static", name).read_bytes()
    return content, xxh3_64_hexdigest(content)


def static_file(request: web.Request) -> web.Response:
    """One of our own files; its address names its contents, so that a browser may keep it for ever."""
    name = request.match_info["name"]
    if name not in _TYPES:
        raise web.HTTPNotFound
    content, _ = _static(name)
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return web.Response(body=content, content_type=_TYPES[name], charset="utf-8", headers=headers)


def _static_path(name: str) -> str:
    return f"{PREFIX}/static/{name}?v={_static(name)[1]}"


class Pages:
    """Renders templates. Values are escaped wherever they are written; a name that is missing is an error.

    `facts` are what every page may show of the scheduler, found anew for each.
    """

    def __init__(self, scheduler_name: str, *, secure: bool) -> None:
        self._secure = secure
        self._templates = Environment(
            loader=PackageLoader("headway_console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)
        self._templates.globals.update(
            prefix=PREFIX,
            static=_static_path,
            csrf_field=CSRF_FIELD,
            scheduler_name=scheduler_name,
            metrics=heatmap.METRICS,
            level=heatmap.level,
            sparkline=charts.sparkline,
            to_json=json.dumps,
        )
        for name in self._templates.list_templates():
            self._templates.get_template(name)  # compiled now, not while requests wait

    async def page(self, visit: Visit, template: str, code: int = 200, **values: Any) -> web.Response:
        """The whole page, or the block of it that was asked for."""
        part = visit.part
        notice = ""
        if not part:
            notice, visit.session.notice = visit.session.notice, ""
        context = values | {
            "visit": visit,
            "csrf": visit.session.csrf,
            "may_change": visit.may_change,
            "notice": notice,
        }
        response = await self._answer(visit.request, template, context, code, part)
        if visit.fresh:
            self.keep_session(response, visit.session.id)
        return response

    async def bare(self, request: web.Request, template: str, code: int = 200, **values: Any) -> web.Response:
        """A page for nobody in particular: signing in, and what went wrong before."""
        return await self._answer(request, template, values | {"visit": None, "may_change": False, "notice": ""}, code)

    def keep_session(self, response: web.StreamResponse, session_id: str) -> None:
        """Send the cookie: no script reads it, no other site's page sends it."""
        response.set_cookie(
            COOKIE, session_id, path=PREFIX, httponly=True, secure=self._secure, samesite="Strict", max_age=12 * 3600
        )

    async def _answer(
        self, request: web.Request, template: str, values: Mapping[str, Any], code: int, part: str = ""
    ) -> web.Response:
        theme = request.cookies.get(THEME_COOKIE, "")
        context = {**values, "theme": theme if theme in _THEMES else "", "path": request.path}
        found = self._templates.get_template(template)
        whole = not part or part not in found.blocks
        pieces = found.generate(context) if whole else found.blocks[part](found.new_context(context))
        text = ""
        while piece := "".join(islice(pieces, _AT_ONCE)):
            text += piece
            await asyncio.sleep(0)  # let decisions pass
        return web.Response(text=text, status=code, content_type="text/html")
