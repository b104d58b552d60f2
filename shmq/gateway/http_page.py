"""The page of `shmq page` in the gateway: read-only, by the rules of its other routes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from shmq import audit
from shmq.gateway.access import Access, Refusal
from shmq.gateway.context import Context
from shmq.gateway.host import Grant
from shmq.gateway.http_messages import TEXT, Answer, Params, failure, reply

if TYPE_CHECKING:
    from shmq.page.server import Handler, Page

COOKIE: Final = "shmq_page"
_MOST_VIEWERS: Final = 200  # of one gateway process


def is_page(path: str) -> bool:
    """Whether a path is one of the page's."""
    return path == "/page" or path.startswith("/page/")


class PageRoutes:
    """The page's paths. Nothing of it is loaded before somebody opens it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._page: Page | None = None
        self._reads: dict[str, Handler] = {}

    async def answer(
        self, request: web.BaseRequest, params: Params, access: Access, grant: Grant | None
    ) -> Answer:
        """Answer a GET that the access rules allow. grant: of the access file."""
        page = self._page or await self._open()
        from shmq.page.guard import HEADERS
        from shmq.page.server import BODIES

        token = params.get("token")
        if token is not None:
            return _welcome(request, access.page_cookie(token), HEADERS)
        handler = self._reads.get(request.path)
        if handler is None:
            answer = failure(404, "NOT_FOUND")
            answer.headers.update(HEADERS)
            return answer
        if grant is not None:
            request[BODIES] = grant.allows("bodies", "", "")
        else:
            cookie = request.cookies.get(COOKIE, "")
            request[BODIES] = access.is_known(request.headers, cookie)
        return await page.answer(request, handler)

    async def _open(self) -> Page:
        page = await asyncio.to_thread(self._load)
        if self._page is None:
            self._page, self._reads = page, page.reads()
        else:  # another request was faster
            await page.close()
        return self._page

    def _load(self) -> Page:
        from shmq.page.server import Page

        return Page(self._context.options.instance, most_viewers=_MOST_VIEWERS)

    async def close(self) -> None:
        """Let all browsers go."""
        if self._page is not None:
            await self._page.close()


def _welcome(request: web.BaseRequest, cookie: str | None, headers: Any) -> web.Response:
    """Answer an address with a token: the browser keeps a cookie that shows that it knew it."""
    if cookie is None:
        audit.note("login", result="refused", method="GET", path=request.path)
        return reply(401, "shmq: the gateway does not know this token\n", TEXT, nsq=False)
    answer = web.Response(status=303, headers={"Location": "/page/", **headers})
    secure = request.scheme == "https"
    answer.set_cookie(COOKIE, cookie, path="/page", httponly=True, samesite="Strict", secure=secure)
    return answer


def refused(refusal: Refusal) -> web.Response:
    """Tell a person why the page is not shown."""
    text = f"shmq: {refusal.text}\n"
    if refusal.status == 401:
        text = "shmq: this page needs a token of --http-token-file: open /page/?token=TOKEN\n"
    answer = reply(refusal.status, text, TEXT, nsq=False)
    if refusal.challenge:
        answer.headers["WWW-Authenticate"] = refusal.challenge
    return answer
