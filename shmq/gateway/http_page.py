"""The page of `shmq page` in the gateway: read-only, by the rules of its other routes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web

from shmq.gateway.access import Access, Refusal
from shmq.gateway.context import Context
from shmq.gateway.host import Grant
from shmq.gateway.http_messages import JSON, TEXT, Answer, Params, dump, failure, reply
from shmq.users import User

if TYPE_CHECKING:
    from shmq.page.server import Handler, Page
    from shmq.page.sight import Sight

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
        from shmq.page.sight import EVERYTHING, SIGHT, WITHOUT_BODIES
        from shmq.page.viewers import GUEST

        if request.path == "/page/login":
            shown = access.page_pass(request.headers)
            if grant is not None:  # a user of the access file shows who he is with each request
                shown = ""
            answer = (
                _refused(401)
                if shown is None
                else reply(200, dump({"pass": shown}), JSON, nsq=False)
            )
            answer.headers.update(HEADERS)
            return answer
        handler = self._reads.get(request.path)
        if handler is None:
            answer = failure(404, "NOT_FOUND")
            answer.headers.update(HEADERS)
            return answer
        if grant is not None and grant.known is not None:
            request[SIGHT] = sight_of_user(grant.known.user)
        elif access.is_known(request.headers):
            request[SIGHT] = EVERYTHING
        else:
            request[SIGHT], request[GUEST] = WITHOUT_BODIES, True
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

    def changed(self) -> None:
        """The access rules have changed: browsers come again, by those of now."""
        if self._page is not None:
            self._page.disconnect()

    async def close(self) -> None:
        """Let all browsers go."""
        if self._page is not None:
            await self._page.close()


def sight_of_user(user: User) -> Sight:
    """The part of the page that a user of the access file may see."""
    from shmq.page.sight import Sight

    def sees(topic: str, channel: str | None) -> bool:
        return user.may("statistics", topic, channel or "")

    def reads(topic: str, channel: str | None) -> bool:
        return user.may("bodies", topic, channel or "")

    return Sight(user, sees, reads, user.may("statistics"))


def _refused(status: int) -> web.Response:
    text = "shmq: this page needs a token of --http-token-file: open /page/#token=TOKEN\n"
    return reply(status, text, TEXT, nsq=False)


def refused(refusal: Refusal) -> web.Response:
    """Tell a person why the page is not shown."""
    answer = reply(refusal.status, f"shmq: {refusal.text}\n", TEXT, nsq=False)
    if refusal.status == 401:
        answer = _refused(401)
    if refusal.challenge:
        answer.headers["WWW-Authenticate"] = refusal.challenge
    return answer
