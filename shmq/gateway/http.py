"""nsqd's HTTP interface (nsqio/nsq nsqd/http.go), and `/metrics` for Prometheus."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import posixpath
import re
import socket
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shmq import _native, audit, prometheus
from shmq.door import target
from shmq.door.http_server import RawResponse
from shmq.door.page_pass import is_public
from shmq.door.seats import Seats
from shmq.door.seldom import Seldom
from shmq.door.shortage import shortage
from shmq.errors import Full, Gone, MessageTooBig, NotSealed, Rejected, ShmqError
from shmq.gateway import http_messages, http_page, http_server, nsqd_stats
from shmq.gateway.access import Access, Action, Listener, Refusal
from shmq.gateway.acts import need_of
from shmq.gateway.context import Context
from shmq.gateway.host import Grant
from shmq.gateway.http_config import ConfigPages
from shmq.gateway.http_debug import Busy, DebugPages
from shmq.gateway.http_messages import (
    JSON,
    TEXT,
    Answer,
    Handler,
    HttpError,
    Params,
    Routes,
    allow,
    binary_bodies,
    braked,
    check_declared,
    count_of,
    failure,
    in_chunks,
    not_allowed,
    page,
    params_of,
    read_body,
    refused,
    reply,
    reply_of,
    topic_of,
)
from shmq.gateway.rights import is_permitted, secret_of
from shmq.gateway.shares import TooManyChannels, TooManyTopics, asking
from shmq.gateway.tokens import Tokens
from shmq.names import valid_name
from shmq.nsqd import NSQD_VERSION
from shmq.option_types import to_ns
from shmq.patience import Patience
from shmq.users import name_in

#: Seconds between two attempts to publish to a full queue.
_ROOM_EVERY: Final = 0.002
_TABLE_FULL: Final = _native.STATUS["TABLE_FULL"][2]

#: Beginnings of paths that are answered even if all connections are taken.
_ADMINISTRATION: Final = (
    *("/ping", "/info", "/stats", "/metrics", "/topic/", "/channel/", "/config/", "/debug/"),
)

_log = logging.getLogger(__name__)


class Http:
    """The routes of one gateway process."""

    def __init__(self, context: Context, tokens: Tokens, seats: Seats | None = None) -> None:
        """seats: the places of the process; None: any number."""
        self._context = context
        self._seats = seats or Seats(lambda: 1 << 30, lambda: 0)
        self._tokens = tokens
        self._access = Access(context.options, tokens.accepted)
        self._config = ConfigPages(context)
        self._page = http_page.PageRoutes(context)
        self._refused = Seldom(_log, "refused requests")
        self._failed = Seldom(_log, "failed requests")
        topic, channel = "/topic/", "/channel/"
        self._routes: Routes = {
            "/ping": {"GET": self._ping},
            "/info": {"GET": self._info},
            "/stats": {"GET": self._stats},
            "/metrics": {"GET": self._metrics},
            "/pub": {"POST": self._pub},
            "/mpub": {"POST": self._mpub},
            f"{topic}create": {"POST": self._create_topic},
            f"{topic}empty": {"POST": self._empty_topic},
            f"{topic}delete": {"POST": self._topic_verb("delete_topic")},
            f"{topic}pause": {"POST": self._topic_verb("pause_topic")},
            f"{topic}unpause": {"POST": self._topic_verb("unpause_topic")},
            f"{channel}create": {"POST": self._create_channel},
            **{
                f"{channel}{verb}": {"POST": self._channel_verb(f"{verb}_channel")}
                for verb in ("delete", "empty", "pause", "unpause")
            },
            **DebugPages(context).routes(),
        }

    def server(self, secure: bool, sock: socket.socket | None = None) -> http_server.Server:
        """Return the server of a listening socket; `secure` if its connections use TLS."""
        listener = Listener(secure, local=False, unix=False)
        if sock is not None:
            listener = Listener.of(sock, secure)
        # a compressed body is published without being decompressed, as nsqd does
        return http_server.Server(
            self._handle,
            listener,
            self._unparsed,
            auto_decompress=False,
            keepalive_timeout=http_messages.REQUEST_SECONDS,
        )

    def changed(self) -> None:
        """Apply the changed options and tokens."""
        self._access = Access(self._context.options, self._tokens.accepted)
        if self._context.options.access_file:
            self._page.changed()

    async def close(self) -> None:
        """Let the browsers go that watch the page."""
        await self._page.close()

    # ---- every request ----

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client = request.protocol
        assert isinstance(client, http_server.Connection)
        with audit.acting(client.by):
            return await self._timed(request, client)

    async def _timed(
        self, request: web.BaseRequest, client: http_server.Connection
    ) -> web.StreamResponse:
        began = time.perf_counter()
        client.rules, client.again = self._access, None
        raw = request.raw_path
        if "://" in raw[:8]:  # proxies send whole URLs
            raw = "/" + raw.partition("://")[2].partition("/")[2]
        path, _, query = raw.partition("?")
        path = urllib.parse.unquote(path)
        response = await self._answer(request, path, query, client)
        in_chunks(request, response)
        if path not in ("/pub", "/mpub"):
            took = (time.perf_counter() - began) * 1000
            status, remote, shown = response.status, request.remote or "@", target.shown(raw)
            _log.info("%d %s %s (%s) %.3fms", status, request.method, shown, remote, took)
        return response

    async def _answer(
        self, request: web.BaseRequest, path: str, query: str, client: http_server.Connection
    ) -> web.StreamResponse:
        options = self._context.options
        everywhere = options.tls_required == "true" or (
            options.tls_required == "false" and options.tls_client_auth_policy
        )
        if everywhere and not client.listener.secure:
            port = self._context.ports.get("https", 0)
            body = f'{{"message": "TLS_REQUIRED", "https_port": {port}}}'
            return reply(403, body, JSON, nsq=True)
        if request.version[0] != 1:
            reason = "HTTP Version Not Supported: unsupported protocol version"
            return RawResponse(505, reason)
        if client.seat.reserved and not self._is_urgent(path):
            return http_messages.later("TOO_MANY_CONNECTIONS")
        refusal = await self._refusal(request, path, client)
        if refusal is not None:
            return refusal
        if path == "*" and request.method == "OPTIONS":
            return web.Response()
        methods = self._methods(path)
        if methods is None:
            return self._unknown(request.method, path, query)
        if request.method == "OPTIONS":
            return web.Response(status=200, headers={"Allow": allow(methods)})
        handler = methods.get(request.method)
        if handler is None:
            return not_allowed(methods)
        grant = client.grant
        plain = path == "/ping" or path.startswith("/debug/") or http_page.is_page(path)
        try:
            params = params_of(query)
            if grant is not None and not is_permitted(grant, request.method, path, params):
                return self._forbidden(request, path, client)
            user = grant.identity if grant is not None else ""
            with audit.acting(client.by, user), asking(client.asker()):
                answer = await handler(request, params)
        except HttpError as error:
            response = failure(error.status, error.text)
            if error.retry:
                response.headers["Retry-After"] = str(math.ceil(error.retry))
            if error.close:
                response.force_close()
            return response
        except (ConnectionError, asyncio.CancelledError):
            raise
        except (web.RequestPayloadError, HttpProcessingError) as exc:  # nsqd's answer is the same
            said = " ".join(str(exc).split())
            text = "the body of %s %s of %s: %s"
            where = target.path_of(path)
            self._failed(logging.INFO, text, request.method, where, client.by, said)
            response = failure(500, "INTERNAL_ERROR")
            response.force_close()
            return response
        except Busy:
            return page("a profile is being taken already\n", 500)
        except NotSealed:
            return failure(403, "TOPIC_SEALED")
        except ShmqError as exc:
            self._failed(logging.ERROR, "%s %s: %s", request.method, target.path_of(path), exc)
            return failure(503, _word_of(exc, path))
        except Exception as exc:
            where = target.path_of(path)
            if short := shortage(exc):
                self._failed(logging.ERROR, "%s %s cannot go on: %s", request.method, where, short)
                return http_messages.no_means()
            self._failed(logging.ERROR, "%s %s crashed", request.method, where, exc_info=exc)
            return failure(500, "INTERNAL_ERROR")
        return reply_of(answer, nsq=not plain)

    async def _refusal(
        self, request: web.BaseRequest, path: str, client: http_server.Connection
    ) -> web.StreamResponse | None:
        """Return the answer to a client that is not allowed to send this request, or None."""
        action, key = _action_of(request.method, path)
        need = need_of(request.method, path)
        administers = need is not None and need.acts == ("administer",)
        of_page = http_page.is_page(path) and action is Action.READ
        listener = client.listener

        def look() -> Refusal | None:
            peer = client.peer
            return self._access.refusal(action, key, request.headers, peer, listener, administers)

        refusal = look()
        if refusal is None or refusal.status == 401:
            shown = self._access.shown(action, request.headers, of_page)
            if shown and shown != client.proven and not await self._is_right(shown, client):
                return braked()
            # what is right may have become another thing while it waited
            refusal = look()
        if refusal is None:
            return await self._enter(request, path, client)
        if of_page and self._may_open_page(request, refusal):
            return None
        if refusal.why:
            text = "%s %s of %s refused: %s"
            where = target.path_of(path)
            self._refused(logging.WARNING, text, request.method, where, client.by, refusal.why)
        if refusal.status == 401:
            client.proven = b""
            audit.note("login", result="refused", method=request.method, path=target.path_of(path))
        return http_page.refused(refusal) if of_page else refused(refusal)

    def _is_urgent(self, path: str) -> bool:
        """Whether a connection for which there is no place gets an answer: while few of these are
        there, each that needs no place for long."""
        if path.startswith(_ADMINISTRATION):
            return True
        return path != "/page/ticks" and not self._seats.is_crowded()

    async def _is_right(self, shown: bytes, client: http_server.Connection) -> bool:
        """Have the brake look at what a client shows. Returns false if there is no turn for it."""
        attempt = self._context.brake.attempt(client.who, shown)
        if not await attempt.turn():
            return False
        if self._access.is_right(shown):
            attempt.passed()
            client.proven = shown
        else:
            await attempt.failed()
        return True

    # ---- the access file ----

    async def _enter(
        self, request: web.BaseRequest, path: str, client: http_server.Connection
    ) -> web.StreamResponse | None:
        """Find out which user of the access file sends a request. Returns the answer to somebody
        who is none; None: `client.grant` has his rights, or there is no such file."""
        client.grant = None
        if not self._context.options.access_file or path == "/ping":
            return None
        rights = self._context.rights
        if rights.users is None or (is_public(path) and is_public(request.path)):
            return None
        header = request.headers.get("Authorization")
        if header is None:
            grant = rights.greet(client.uid, client.subject)
        else:
            secret = secret_of(header)
            grant = rights.at_once(secret) if secret and secret == client.proven else None
            if grant is None:
                attempt = self._context.brake.attempt(client.who, secret, name_in(secret))
                if not await attempt.turn():
                    return braked()
                grant = await self._login(secret, client)
                client.proven = secret if grant is not None else b""
                if grant is None:
                    await attempt.failed()
                else:
                    attempt.passed()
        if grant is None:
            if header is None:
                self._context.is_nobody(client.who, client.by, client.uid, client.subject)
            else:
                where = target.path_of(path)
                audit.note("login", result="refused", method=request.method, path=where)
            return refused(Refusal(401, "UNAUTHORIZED", 'Basic realm="shmq", charset="UTF-8"'))
        if reason := self._count(client, grant):
            answer = failure(429, "TOO_MANY_CONNECTIONS")
            answer.force_close()
            self._refused(logging.WARNING, "%s refused: %s", client.by, reason)
            return answer
        client.grant = grant
        return None

    async def _login(self, secret: bytes, client: http_server.Connection) -> Grant | None:
        """The rights of who brings a secret; only a password needs a thread."""
        rights = self._context.rights
        grant = rights.at_once(secret)
        if grant is None and b":" in secret:
            call = functools.partial(rights.login, secret)
            grant = await self._context.pools.of("password").ask(client.who, call)
        return grant

    def _count(self, client: http_server.Connection, grant: Grant) -> str:
        """Count the connection as one of this user. Returns why it is one too many."""
        rights, lost = self._context.rights, client.lost
        if isinstance(lost, functools.partial) and lost.args[0].identity == grant.identity:
            return ""
        if lost is not None:
            lost()
            client.lost = None
        reason = rights.enter(grant)
        if not reason:
            client.lost = functools.partial(rights.leave, grant)
        return reason

    def _forbidden(
        self, request: web.BaseRequest, path: str, client: http_server.Connection
    ) -> web.StreamResponse:
        """Answer a user whose rules do not grant this. The answer is the same for names that are
        there and names that are not."""
        assert client.grant is not None
        who = client.grant.identity
        text = "%s %s of %s refused: no rule grants it to %s"
        where = target.path_of(path)
        self._refused(logging.WARNING, text, request.method, where, client.by, who)
        return failure(403, "FORBIDDEN")

    @staticmethod
    def _grant(request: web.BaseRequest) -> Grant | None:
        client = request.protocol
        assert isinstance(client, http_server.Connection)
        return client.grant

    def _take_turn(self, request: web.BaseRequest) -> None:
        """Raise HttpError if the user has published more than he may by now."""
        grant = self._grant(request)
        if grant is not None and (pause := self._context.rights.pause(grant)):
            raise HttpError(429, "TOO_MANY_MESSAGES", retry=pause)

    def _spend(self, request: web.BaseRequest, topic: str, messages: int) -> None:
        """Count messages that a client has published."""
        client = request.protocol
        assert isinstance(client, http_server.Connection)
        grant = client.grant
        if grant is not None:
            self._context.rights.spend(grant, messages)
        user = grant.identity if grant is not None else ""
        self._context.published.add(client.who, user, topic, messages)

    def _may_open_page(self, request: web.BaseRequest, refusal: Refusal) -> bool:
        """Whether the page's script shows that it knows a token, or asks for what everybody has."""
        return refusal.status == 401 and (
            is_public(request.path) or self._access.is_known(request.headers)
        )

    async def _show_page(self, request: web.BaseRequest, params: Params) -> Answer:
        return await self._page.answer(request, params, self._access, self._grant(request))

    def _unparsed(self, method: str, whole: str) -> web.StreamResponse:
        """Answer a method or a target that aiohttp's parser refuses. The connection is closed,
        because the start of the next request is unknown."""
        methods = self._methods(whole.partition("?")[0])
        if whole == "*":
            methods = dict.fromkeys(("GET", "POST", "PUT"), self._ping)
        response = failure(404, "NOT_FOUND") if methods is None else not_allowed(methods)
        response.force_close()
        return response

    def _methods(self, path: str) -> dict[str, Handler] | None:
        found = self._routes.get(path)
        if found is None and re.fullmatch(r"/config/[^/]+", path):
            return {"GET": self._config.get, "PUT": self._config.put}
        if http_page.is_page(path):
            return {"GET": self._show_page}
        return found

    def _unknown(self, method: str, path: str, query: str) -> web.StreamResponse:
        """Answer an unknown path. If it differs from a known one only in slashes, dots or letter
        case, redirect to that one."""
        folded = posixpath.normpath(re.sub("/+", "/", path))
        for candidate in (folded, f"{folded}/", folded.lower(), f"{folded.lower()}/"):
            if candidate == path or not target.is_plain(candidate):
                continue
            if method in (self._methods(candidate) or ()):
                rest = target.kept(query)
                where = candidate + (f"?{rest}" if rest else "")
                status = 301 if method == "GET" else 307
                return web.Response(status=status, headers={"Location": where})
        return failure(404, "NOT_FOUND")

    # ---- /ping, /info, /stats, /metrics ----

    async def _ping(self, request: web.BaseRequest, params: Params) -> Answer:
        health = self._context.health
        return reply(200 if health == "OK" else 500, health, TEXT, nsq=False)

    async def _info(self, request: web.BaseRequest, params: Params) -> Answer:
        context = self._context
        options = context.options
        return {
            "version": NSQD_VERSION,
            "broadcast_address": options.broadcast_address,
            "hostname": socket.gethostname(),
            "http_port": context.ports.get("http", 0),
            "tcp_port": context.ports.get("tcp", 0),
            "start_time": context.start_time,
            "max_heartbeat_interval": to_ns(options.max_heartbeat_interval),
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": to_ns(options.max_output_buffer_timeout),
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }

    async def _stats(self, request: web.BaseRequest, params: Params) -> Answer:
        wanted = (
            params.get("topic", ""),
            params.get("channel", ""),
            params.get("include_clients") not in ("false", "0"),
            params.get("include_mem") not in ("false", "0"),
        )
        grant = self._grant(request)
        allows = grant.allows if grant else None
        stats = await nsqd_stats.collect(self._context, allows, wanted[0])
        if params.get("format") == "json":
            return stats.document(*wanted)
        return stats.text(*wanted)

    async def _metrics(self, request: web.BaseRequest, params: Params) -> Answer:
        stats = await self._context.call(self._context.broker.stats, kind="look")
        grant = self._grant(request)
        if grant is not None:
            stats = nsqd_stats.permitted(stats, grant.allows)
        text = await self._context.call(prometheus.exposition, stats, kind="look")
        reports = await self._context.control.ask_all({"ask": "counts"})
        counts = sum((Counter(report) for report in reports), Counter[str]())
        text += prometheus.of_gateway(stats.instance, counts)
        return web.Response(body=text.encode(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    # ---- publishing ----

    async def _pub(self, request: web.BaseRequest, params: Params) -> Answer:
        options = self._context.options
        body = await read_body(request, options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise HttpError(400, "MSG_EMPTY")
        topic = topic_of(params, "INVALID_TOPIC")
        self._take_turn(request)
        await self._make(topic)
        defer = None
        if "defer" in params:
            text = params["defer"]
            most = round(options.max_req_timeout * 1000)
            if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not 0 <= int(text) <= most:
                raise HttpError(400, "INVALID_DEFER")
            defer = int(text) / 1000 or None
        await self._publish(topic, lambda producer: producer.publish(body, defer, 0))
        self._spend(request, topic, 1)
        self._again(request, topic, options.max_msg_size, lambda p, body: p.publish(body, defer, 0))
        return "OK"

    async def _mpub(self, request: web.BaseRequest, params: Params) -> Answer:
        options = self._context.options
        check_declared(request, options.max_body_size, "BODY_TOO_BIG")
        topic = topic_of(params, "INVALID_TOPIC")
        self._take_turn(request)
        await self._make(topic)
        body = await read_body(request, options.max_body_size, "BODY_TOO_BIG")
        binary = "binary" in params and params["binary"] not in ("false", "0")
        if binary:
            count = count_of(body, options.max_msg_size, options.max_body_size)
            try:
                await self._publish(topic, lambda p: p.publish_framed(body, 4, count, None, 0))
                self._spend(request, topic, count)
                self._again(request, topic, options.max_body_size, self._publish_binary)
                return "OK"
            except MessageTooBig:  # all of them never fit into memory; the halves may
                messages = binary_bodies(body, count)
        else:
            messages = [line for line in body.split(b"\n") if line]
            if any(len(line) > options.max_msg_size for line in messages):
                raise HttpError(413, "MSG_TOO_BIG")
        if messages:
            await self._publish_many(topic, messages)
        self._spend(request, topic, len(messages))
        return "OK"

    def _again(
        self, request: web.BaseRequest, topic: str, most: int, publish: Callable[[Any, bytes], Any]
    ) -> None:
        """Let the connection publish bodies of up to `most` bytes by itself while it sends the head
        of this request, whose answer is OK, again, and the options stay the same."""
        client = request.protocol
        assert isinstance(client, http_server.Connection)
        name, rules, grant = topic.encode(), client.rules, client.grant
        if grant is not None and grant.quota.messages_per_second is not None:
            return  # each of them is counted

        def again(body: bytes) -> bool:
            producer = self._context.producers.get(name)
            if producer is None or rules is not self._access or len(body) > most:
                return False
            try:
                publish(producer, body)
            except (ShmqError, OSError, HttpError):
                return False  # the request is answered the long way, which says why
            if audited.interval:
                count = int.from_bytes(body[:4], "big") if binary else 1
                audited.add(client.who, user, topic, count)
            return True

        user = grant.identity if grant is not None else ""
        audited, binary = self._context.published, request.path == "/mpub"
        client.again = http_server.Again(again)

    def _publish_binary(self, producer: Any, body: bytes) -> None:
        options = self._context.options
        count = count_of(body, options.max_msg_size, options.max_body_size)
        producer.publish_framed(body, 4, count, None, 0)

    async def _make(self, topic: str) -> None:
        """Create the topic if it is missing. An existing one needs no thread."""
        if topic.encode() not in self._context.producers:
            await self._with_topic(self._context.producer, topic)

    async def _with_topic(self, call: Callable[[str], Any], topic: str) -> Any:
        """Make a call that creates the topic if it is missing."""
        return await self._context.call(call, topic, kind=self._context.kind_of(topic.encode()))

    async def _publish_many(self, topic: str, messages: list[bytes]) -> None:
        """Publish all messages at once; halve a batch that can never fit into memory."""
        try:
            await self._publish(topic, lambda producer: producer.publish_list(messages, None, 0))
        except MessageTooBig:
            if len(messages) == 1:
                raise HttpError(413, "MSG_TOO_BIG") from None
            for piece in messages[: len(messages) // 2], messages[len(messages) // 2 :]:
                await self._publish_many(topic, piece)

    async def _publish(self, topic: str, publish: Callable[[Any], Any]) -> None:
        patience = Patience()
        while True:
            producer = self._context.producers.get(topic.encode())
            try:
                if producer is None:
                    producer = await self._with_topic(self._context.producer, topic)
                publish(producer)
                return
            except Rejected:
                raise HttpError(503, "CHANNEL_FULL") from None
            except NotSealed:
                raise HttpError(403, "TOPIC_SEALED") from None
            except Full as error:
                if self._context.no_room():
                    raise HttpError(503, "EXITING") from None
                patience.refused(error)
                await asyncio.sleep(_ROOM_EVERY)
            except Gone:
                self._context.producers.pop(topic.encode(), None)
                if self._context.broker.closed:
                    raise HttpError(503, "EXITING") from None
            except MessageTooBig:
                raise
            except ShmqError as exc:
                _log.error("publish to %s: %s", topic, exc)
                raise HttpError(503, "EXITING") from None

    # ---- topics and channels ----

    async def _create_topic(self, request: web.BaseRequest, params: Params) -> Answer:
        topic = topic_of(params, "INVALID_TOPIC")
        await self._with_topic(self._context.create_topic, topic)
        return None

    async def _empty_topic(self, request: web.BaseRequest, params: Params) -> Answer:
        topic = topic_of(params, "INVALID_TOPIC")
        call = _audited("empty_topic", self._context.broker.empty_topic, topic)
        await self._existing(call, "TOPIC_NOT_FOUND")
        return None

    def _topic_verb(self, verb: str) -> Handler:
        async def handler(request: web.BaseRequest, params: Params) -> Answer:
            topic = params.get("topic")
            if topic is None:
                raise HttpError(400, "MISSING_ARG_TOPIC")
            if not valid_name(topic):
                raise HttpError(404, "TOPIC_NOT_FOUND")
            call = _audited(verb, getattr(self._context.broker, verb), topic)
            await self._existing(call, "TOPIC_NOT_FOUND")
            self._context.producers.pop(topic.encode(), None)
            return None

        return handler

    async def _create_channel(self, request: web.BaseRequest, params: Params) -> Answer:
        topic, channel = self._channel_of(params)
        await self._context.call(self._context.create_channel, topic, channel)
        return None

    def _channel_verb(self, verb: str) -> Handler:
        async def handler(request: web.BaseRequest, params: Params) -> Answer:
            topic, channel = self._channel_of(params)
            call = _audited(verb, getattr(self._context.broker, verb), topic, channel)
            await self._existing(call, "CHANNEL_NOT_FOUND")
            return None

        return handler

    def _channel_of(self, params: Params) -> tuple[str, str]:
        """Return the names of the topic and the channel; the topic exists."""
        topic = topic_of(params, "INVALID_ARG_TOPIC")
        channel = params.get("channel")
        if channel is None:
            raise HttpError(400, "MISSING_ARG_CHANNEL")
        if not valid_name(channel):
            raise HttpError(400, "INVALID_ARG_CHANNEL")
        if not self._context.has_topic(topic):
            raise HttpError(404, "TOPIC_NOT_FOUND")
        return topic, channel

    async def _existing(self, call: Callable[[], Any], missing: str) -> None:
        try:
            await self._context.call(call)
        except Gone:
            raise HttpError(404, missing) from None


# ---- helpers ----


def _audited(action: str, call: Callable[..., Any], *names: str) -> Callable[[], Any]:
    def run() -> Any:
        with audit.noted(action, *names):
            return call(*names)

    return run


def _word_of(exc: ShmqError, path: str) -> str:
    """Return the word for an error that nsqd does not have: a full table of topics or channels;
    for any other, nsqd's word for a failed publish."""
    if isinstance(exc, TooManyTopics):
        return "TOO_MANY_TOPICS"
    if isinstance(exc, TooManyChannels):
        return "TOO_MANY_CHANNELS"
    if _TABLE_FULL in str(exc):
        return "TOO_MANY_CHANNELS" if path == "/channel/create" else "TOO_MANY_TOPICS"
    return "EXITING"


def _action_of(method: str, path: str) -> tuple[Action, str]:
    """Return the kind of a request, and the option that it names."""
    if path == "/ping":
        return Action.PING, ""
    if path.startswith("/debug/"):
        return Action.DEBUG, ""
    if method in ("GET", "HEAD", "OPTIONS"):
        return Action.READ, ""
    if path.startswith("/config/"):
        return Action.CONFIG, path.removeprefix("/config/")
    return Action.WRITE, ""
