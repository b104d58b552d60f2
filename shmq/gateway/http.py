"""nsqd's HTTP interface (nsqio/nsq nsqd/http.go), and `/metrics` for Prometheus."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import posixpath
import re
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shmq import _native, audit, prometheus
from shmq.errors import Full, Gone, MessageTooBig, ShmqError
from shmq.gateway import requests
from shmq.gateway.access import Access, Action, Listener, Refusal, redacted, tokens_of
from shmq.gateway.control import Pending
from shmq.gateway.debug import Busy, Debug
from shmq.gateway.listen import is_host_and_port
from shmq.gateway.report import Report
from shmq.gateway.seldom import Seldom
from shmq.names import valid_name
from shmq.options import OPTIONS, Kind, OptionError, to_ns
from shmq.stats import NSQD_VERSION

if TYPE_CHECKING:
    from shmq.gateway.worker import Worker

_JSON: Final = "application/json; charset=utf-8"
_TEXT: Final = "text/plain; charset=utf-8"
_ROOM_EVERY: Final = 0.002
#: For a request's head to come whole, and again for its body; as long as the TCP protocol waits.
_REQUEST_SECONDS: Final = 60.0
#: Go's server has no Content-Length on a longer answer.
_CHUNKED_ABOVE: Final = 2048
_MOST_LOOKUPDS: Final = 100
#: Flags without effect, which nsqd does not keep.
_NO_OPTIONS: Final = ("verbose", "worker_id")
_LEVELS: Final = ("debug", "info", "warn", "error", "fatal")
_LOGGING: Final = {
    "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING,
    "error": logging.ERROR, "fatal": logging.CRITICAL,
}  # fmt: skip
_REQUIRED: Final = {"false": 0, "tcp-https": 1, "true": 2}
_TLS_NUMBERS: Final = {"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772}

_TABLE_FULL: Final = _native.STATUS["TABLE_FULL"][2]

_log = logging.getLogger(__name__)


class HttpError(Exception):
    """What a request is answered with instead: a status and nsqd's word for it."""

    def __init__(self, status: int, text: str, close: bool = False) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.close = close


Params = dict[str, str]
Answer = web.StreamResponse | str | dict[str, Any] | None
Handler = Callable[[web.BaseRequest, Params], Awaitable[Answer]]


class Http:
    """The routes of one gateway process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._hub = worker.hub
        self._options = worker.options
        self._tokens = tokens_of(worker.options)
        self._access = Access(worker.options, self._tokens)
        self._debug = Debug()
        self._refused = Seldom(_log, "refused requests")
        self._failed = Seldom(_log, "failed requests")
        topic, channel = "/topic/", "/channel/"
        self._routes: dict[str, dict[str, Handler]] = {
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
            "/debug/pprof/": {"GET": self._pprof},
            "/debug/pprof/cmdline": {"GET": self._cmdline},
            "/debug/pprof/symbol": {"GET": self._symbol, "POST": self._symbol},
            "/debug/pprof/profile": {"GET": self._profile},
            "/debug/pprof/heap": {"GET": self._heap},
            "/debug/pprof/goroutine": {"GET": self._goroutine},
            "/debug/pprof/block": {"GET": self._meaningless},
            "/debug/pprof/threadcreate": {"GET": self._meaningless},
            "/debug/freememory": {"POST": self._freememory},
            "/debug/setblockrate": {"PUT": self._setblockrate},
        }

    def server(self, secure: bool, sock: socket.socket | None = None) -> web.Server:
        """What a listening socket is served with; secure: it is TLS."""
        listener = Listener(secure, local=False, unix=False)
        if sock is not None:
            listener = Listener.of(sock, secure)
        # a compressed body is published as it is, as nsqd does
        return requests.Server(
            self._handle, listener, self._untaken, auto_decompress=False,
            keepalive_timeout=_REQUEST_SECONDS,
        )  # fmt: skip

    # ---- every request ----

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client = request.protocol
        assert isinstance(client, requests.Connection)
        with audit.acting(client.by):
            return await self._timed(request, client)

    async def _timed(
        self, request: web.BaseRequest, client: requests.Connection
    ) -> web.StreamResponse:
        began = time.perf_counter()
        raw = request.raw_path
        if "://" in raw[:8]:  # as proxies say it
            raw = "/" + raw.partition("://")[2].partition("/")[2]
        path, _, query = raw.partition("?")
        path = urllib.parse.unquote(path)
        response = await self._answer(request, path, query, client)
        if len(getattr(response, "body", None) or b"") > _CHUNKED_ABOVE:
            _in_chunks(request, response)
        if path not in ("/pub", "/mpub"):
            took = (time.perf_counter() - began) * 1000
            _log.info("%d %s %s (%s) %.3fms", response.status, request.method, raw,
                      request.remote or "@", took)  # fmt: skip
        return response

    async def _answer(
        self, request: web.BaseRequest, path: str, query: str, client: requests.Connection
    ) -> web.StreamResponse:
        options = self._options
        everywhere = options.tls_required == "true" or (
            options.tls_required == "false" and options.tls_client_auth_policy
        )
        if everywhere and not client.listener.secure:
            port = self._worker.ports.get("https", 0)
            body = f'{{"message": "TLS_REQUIRED", "https_port": {port}}}'
            return _response(403, body, _JSON, nsq=True)
        if request.version[0] != 1:
            reason = "HTTP Version Not Supported: unsupported protocol version"
            return requests.RawResponse(505, reason)
        refusal = self._refusal(request, path, client)
        if refusal is not None:
            return refusal
        if path == "*" and request.method == "OPTIONS":
            return web.Response()
        methods = self._methods(path)
        if methods is None:
            return self._elsewhere(request.method, path, query)
        if request.method == "OPTIONS":
            return web.Response(status=200, headers={"Allow": _allow(methods)})
        handler = methods.get(request.method)
        if handler is None:
            return _not_allowed(methods)
        plain = path == "/ping" or path.startswith("/debug/")
        try:
            answer = await handler(request, _params(query))
        except HttpError as error:
            response = _failure(error.status, error.text)
            if error.close:
                response.force_close()
            return response
        except (ConnectionError, asyncio.CancelledError):
            raise
        except (web.RequestPayloadError, HttpProcessingError) as exc:  # as nsqd's
            self._failed(logging.INFO, "the body of %s %s of %s: %s",
                         request.method, path, client.by, " ".join(str(exc).split()))  # fmt: skip
            response = _failure(500, "INTERNAL_ERROR")
            response.force_close()
            return response
        except Busy:
            return _debug("a profile is being taken already\n", 500)
        except ShmqError as exc:
            self._failed(logging.ERROR, "%s %s: %s", request.method, path, exc)
            return _failure(503, _word_of(exc, path))
        except Exception as exc:
            self._failed(logging.ERROR, "%s %s crashed", request.method, path, exc_info=exc)
            return _failure(500, "INTERNAL_ERROR")
        if isinstance(answer, web.StreamResponse):
            return answer
        if answer is None or answer == "":
            return _response(200, "", None, nsq=not plain)
        if isinstance(answer, dict):
            return _response(200, _dump(answer), _JSON, nsq=not plain)
        return _response(200, answer, _TEXT, nsq=not plain)

    def _refusal(
        self, request: web.BaseRequest, path: str, client: requests.Connection
    ) -> web.StreamResponse | None:
        """The answer to who may not ask for this."""
        action, key = _action_of(request.method, path)
        refusal = self._access.refusal(action, key, request.headers, client.peer, client.listener)
        if refusal is None:
            return None
        if refusal.why:
            self._refused(logging.WARNING, "%s %s of %s refused: %s",
                          request.method, path, client.by, refusal.why)  # fmt: skip
        if refusal.status == 401:
            audit.note("login", result="refused", method=request.method, path=path)
        return _refused(refusal)

    def _untaken(self, method: str, target: str) -> web.StreamResponse:
        """Of a method or a target that aiohttp's parser does not take. The connection ends, for
        where the next request begins nobody knows."""
        methods = self._methods(target.partition("?")[0])
        if target == "*":
            methods = dict.fromkeys(("GET", "POST", "PUT"), self._ping)
        response = _failure(404, "NOT_FOUND") if methods is None else _not_allowed(methods)
        response.force_close()
        return response

    def _methods(self, path: str) -> dict[str, Handler] | None:
        found = self._routes.get(path)
        if found is None and re.fullmatch(r"/config/[^/]+", path):
            return {"GET": self._get_config, "PUT": self._put_config}
        return found

    def _elsewhere(self, method: str, path: str, query: str) -> web.StreamResponse:
        """An unknown path; one that only slashes, dots or letter case keep from being known with
        this method is told."""
        folded = posixpath.normpath(re.sub("/+", "/", path))
        for candidate in (folded, f"{folded}/", folded.lower(), f"{folded.lower()}/"):
            if candidate != path and method in (self._methods(candidate) or ()):
                where = candidate + (f"?{query}" if query else "")
                status = 301 if method == "GET" else 307
                return web.Response(status=status, headers={"Location": where})
        return _failure(404, "NOT_FOUND")

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        run = contextvars.copy_context().run  # so that a thread knows for whom it acts
        return await loop.run_in_executor(self._hub.pool, run, call, *args)

    # ---- /ping, /info, /stats, /metrics ----

    @property
    def _health(self) -> str:
        if not self._hub.broker.supervisor_alive():
            return "NOK - the supervisor is not running"
        return self._hub.health

    async def _ping(self, request: web.BaseRequest, params: Params) -> Answer:
        health = self._health
        return _response(200 if health == "OK" else 500, health, _TEXT, nsq=False)

    async def _info(self, request: web.BaseRequest, params: Params) -> Answer:
        options, worker = self._options, self._worker
        return {
            "version": NSQD_VERSION,
            "broadcast_address": options.broadcast_address,
            "hostname": socket.gethostname(),
            "http_port": worker.ports.get("http", 0),
            "tcp_port": worker.ports.get("tcp", 0),
            "start_time": worker.start_time,
            "max_heartbeat_interval": to_ns(options.max_heartbeat_interval),
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": to_ns(options.max_output_buffer_timeout),
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }

    async def report(self) -> Report:
        """One look at everything."""
        stats = await self._call(self._hub.broker.stats)
        answers = await self._worker.control.ask_all({"ask": "connections"})
        connections = [item for answer in answers for item in answer]
        return Report(
            stats, connections, self._health, self._worker.start_time,
            self._options.e2e_processing_latency_percentile,
        )  # fmt: skip

    async def _stats(self, request: web.BaseRequest, params: Params) -> Answer:
        wanted = (
            params.get("topic", ""),
            params.get("channel", ""),
            params.get("include_clients") not in ("false", "0"),
            params.get("include_mem") not in ("false", "0"),
        )
        report = await self.report()
        if params.get("format") == "json":
            return report.document(*wanted)
        return report.text(*wanted)

    async def _metrics(self, request: web.BaseRequest, params: Params) -> Answer:
        stats = await self._call(self._hub.broker.stats)
        page = await self._call(prometheus.exposition, stats)
        return web.Response(body=page.encode(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    # ---- publishing ----

    async def _pub(self, request: web.BaseRequest, params: Params) -> Answer:
        options = self._options
        body = await _read(request, options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise HttpError(400, "MSG_EMPTY")
        topic = _topic(params, "INVALID_TOPIC")
        await self._make(topic)
        defer = None
        if "defer" in params:
            text = params["defer"]
            most = round(options.max_req_timeout * 1000)
            if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not 0 <= int(text) <= most:
                raise HttpError(400, "INVALID_DEFER")
            defer = int(text) / 1000 or None
        await self._publish(topic, lambda producer: producer.publish(body, defer, 0))
        return "OK"

    async def _mpub(self, request: web.BaseRequest, params: Params) -> Answer:
        options = self._options
        _declared(request, options.max_body_size, "BODY_TOO_BIG")
        topic = _topic(params, "INVALID_TOPIC")
        await self._make(topic)
        body = await _read(request, options.max_body_size, "BODY_TOO_BIG")
        binary = "binary" in params and params["binary"] not in ("false", "0")
        if binary:
            messages = _binary_bodies(body, options.max_msg_size, options.max_body_size)
        else:
            messages = [line for line in body.split(b"\n") if line]
            if any(len(line) > options.max_msg_size for line in messages):
                raise HttpError(413, "MSG_TOO_BIG")
        await self._publish_many(topic, messages)
        return "OK"

    async def _make(self, topic: str) -> None:
        """The topic, if it is missing; what is there needs no thread."""
        if topic.encode() not in self._hub.producers:
            await self._call(self._hub.producer, topic)

    async def _publish_many(self, topic: str, messages: list[bytes]) -> None:
        """All at once; what can never fit into memory, in halves."""
        if not messages:
            return
        try:
            await self._publish(topic, lambda producer: producer.publish_list(messages, None, 0))
        except MessageTooBig:
            if len(messages) == 1:
                raise HttpError(413, "MSG_TOO_BIG") from None
            middle = len(messages) // 2
            await self._publish_many(topic, messages[:middle])
            await self._publish_many(topic, messages[middle:])

    async def _publish(self, topic: str, publish: Callable[[Any], Any]) -> None:
        while True:
            producer = self._hub.producers.get(topic.encode())
            try:
                if producer is None:
                    producer = await self._call(self._hub.producer, topic)
                publish(producer)
                return
            except Full:
                if self._hub.no_room():
                    raise HttpError(503, "EXITING") from None
                await asyncio.sleep(_ROOM_EVERY)
            except Gone:
                self._hub.producers.pop(topic.encode(), None)
                if self._hub.broker.closed:
                    raise HttpError(503, "EXITING") from None
            except MessageTooBig:
                raise
            except ShmqError as exc:
                _log.error("publish to %s: %s", topic, exc)
                raise HttpError(503, "EXITING") from None

    # ---- topics and channels ----

    async def _create_topic(self, request: web.BaseRequest, params: Params) -> Answer:
        await self._call(self._hub.create_topic, _topic(params, "INVALID_TOPIC"))
        return None

    async def _empty_topic(self, request: web.BaseRequest, params: Params) -> Answer:
        topic = _topic(params, "INVALID_TOPIC")
        call = _audited("empty_topic", self._hub.broker.empty_topic, topic)
        await self._existing(call, "TOPIC_NOT_FOUND")
        return None

    def _topic_verb(self, verb: str) -> Handler:
        async def handler(request: web.BaseRequest, params: Params) -> Answer:
            topic = params.get("topic")
            if topic is None:
                raise HttpError(400, "MISSING_ARG_TOPIC")
            if not valid_name(topic):
                raise HttpError(404, "TOPIC_NOT_FOUND")
            call = _audited(verb, getattr(self._hub.broker, verb), topic)
            await self._existing(call, "TOPIC_NOT_FOUND")
            self._hub.producers.pop(topic.encode(), None)
            return None

        return handler

    async def _create_channel(self, request: web.BaseRequest, params: Params) -> Answer:
        topic, channel = self._channel_of(params)
        await self._call(self._hub.create_channel, topic, channel)
        return None

    def _channel_verb(self, verb: str) -> Handler:
        async def handler(request: web.BaseRequest, params: Params) -> Answer:
            topic, channel = self._channel_of(params)
            call = _audited(verb, getattr(self._hub.broker, verb), topic, channel)
            await self._existing(call, "CHANNEL_NOT_FOUND")
            return None

        return handler

    def _channel_of(self, params: Params) -> tuple[str, str]:
        """Both names, of a topic that there is."""
        topic = _topic(params, "INVALID_ARG_TOPIC")
        channel = params.get("channel")
        if channel is None:
            raise HttpError(400, "MISSING_ARG_CHANNEL")
        if not valid_name(channel):
            raise HttpError(400, "INVALID_ARG_CHANNEL")
        if self._hub.broker._handle().find_topic(topic) is None:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        return topic, channel

    async def _existing(self, call: Callable[[], Any], missing: str) -> None:
        try:
            await self._call(call)
        except Gone:
            raise HttpError(404, missing) from None

    # ---- /config ----

    async def _get_config(self, request: web.BaseRequest, params: Params) -> Answer:
        return self._config(request.raw_path.partition("?")[0].rpartition("/")[2])

    def _config(self, key: str) -> Answer:
        option = next((item for item in OPTIONS.values() if item.key == key), None)
        if option is None or key in _NO_OPTIONS:
            raise HttpError(400, "INVALID_OPTION")
        value = getattr(self._options, option.name)
        if option.name == "log_level":
            value = _LEVELS.index(value) + 1
        elif option.name == "tls_required":
            value = _REQUIRED[value] or (2 if self._options.tls_client_auth_policy else 0)
        elif option.name == "tls_min_version":
            value = _TLS_NUMBERS[value]
        elif option.name == "statsd_prefix":
            value = self._worker.statsd_prefix()
        elif option.kind is Kind.DURATION:
            value = to_ns(value)
        elif option.kind is Kind.MODE:
            value = option.show(value)
        elif option.kind is Kind.SHARES:  # as Go writes 1.0
            value = [int(share) if share.is_integer() else share for share in value]
        elif option.kind is Kind.TEXTS:
            value = [redacted(item) for item in value]
        if isinstance(value, str):
            return redacted(value)
        return _response(200, _dump(value), _JSON, nsq=True)

    async def _put_config(self, request: web.BaseRequest, params: Params) -> Answer:
        key = request.raw_path.partition("?")[0].rpartition("/")[2]
        try:
            body = await _read(request, self._options.max_msg_size, "INVALID_VALUE")
        except HttpError:
            raise HttpError(413, "INVALID_VALUE") from None
        if not body:
            raise HttpError(413, "INVALID_VALUE")
        if key == "nsqlookupd_tcp_addresses":
            change: dict[str, Any] = {"lookupd_tcp_address": _addresses(body)}
        elif key == "log_level":
            level = body.decode("utf-8", "replace").lower()
            if level not in _LEVELS:
                raise HttpError(400, "INVALID_VALUE")
            change = {"log_level": level}
        else:
            raise HttpError(400, "INVALID_OPTION")
        value = body.decode("utf-8", "replace")
        try:
            await self._worker.control.change(change)
        except Pending as exc:
            audit.note("config", result="pending", option=key, value=value)
            _log.warning("PUT /config/%s: %s", key, exc)
            raise HttpError(503, "CHANGE_PENDING") from None
        except OSError as exc:
            audit.note("config", result="refused", option=key, value=value)
            _log.error("PUT /config/%s: %s", key, exc)
            raise HttpError(500, "INTERNAL_ERROR") from None
        audit.note("config", option=key, value=value)
        return self._config(key)

    def changed(self) -> None:
        """The worker's options are others now. A token file that cannot be read leaves the tokens
        as they were: nobody is let in by a mistake."""
        self._options = self._worker.options
        try:
            self._tokens = tokens_of(self._options)
        except (OptionError, OSError) as exc:
            _log.error("the tokens stay as they were: %s", exc)
        self._access = Access(self._options, self._tokens)
        logging.getLogger().setLevel(_LOGGING[self._options.log_level])

    # ---- /debug ----

    async def _pprof(self, request: web.BaseRequest, params: Params) -> Answer:
        return _debug(
            "profiles of this gateway process:\n"
            "cmdline    its command line\n"
            "profile    ?seconds=N: a cProfile of its event loop, to be read with pstats\n"
            "heap       objects by type\n"
            "goroutine  what its threads and tasks do\n"
            "block, threadcreate, symbol: mean nothing in Python\n"
        )

    async def _cmdline(self, request: web.BaseRequest, params: Params) -> Answer:
        return _debug("\0".join(redacted(word) for word in self._worker.argv))

    async def _symbol(self, request: web.BaseRequest, params: Params) -> Answer:
        return _debug("num_symbols: 0\n")

    async def _meaningless(self, request: web.BaseRequest, params: Params) -> Answer:
        return _debug("there is no such profile in Python\n")

    async def _profile(self, request: web.BaseRequest, params: Params) -> Answer:
        data = await self._debug.profile(params.get("seconds", ""))
        return web.Response(body=data, headers={"Content-Type": "application/octet-stream"})

    async def _heap(self, request: web.BaseRequest, params: Params) -> Answer:
        return _debug(await self._debug.heap())

    async def _goroutine(self, request: web.BaseRequest, params: Params) -> Answer:
        return _debug(self._debug.goroutine())

    async def _freememory(self, request: web.BaseRequest, params: Params) -> Answer:
        self._debug.collect()
        return _failure(500, "INTERNAL_ERROR")  # nsqd's answer, after it has done it

    async def _setblockrate(self, request: web.BaseRequest, params: Params) -> Answer:
        rate = params.get("rate", "")
        if not re.fullmatch(r"[+-]?[0-9]+", rate):
            quoted = json.dumps(rate)
            return _debug(
                f"invalid block rate : strconv.Atoi: parsing {quoted}: invalid syntax", 400
            )
        return _failure(500, "INTERNAL_ERROR")


# ---- helpers ----


def _audited(action: str, call: Callable[..., Any], *names: str) -> Callable[[], Any]:
    def run() -> Any:
        with audit.noted(action, *names):
            return call(*names)

    return run


def _response(status: int, body: str, kind: str | None, nsq: bool) -> web.Response:
    headers = {"X-Nsq-Content-Type": "nsq; version=1.0"} if nsq else {}
    if kind is not None:
        headers["Content-Type"] = kind
    # what a client calls itself may be half a character
    response = web.Response(status=status, headers=headers, body=body.encode("utf-8", "replace"))
    if kind is None:
        response.headers.pop("Content-Type", None)
    return response


def _debug(text: str, status: int = 200) -> web.Response:
    return _response(status, text, _TEXT, nsq=False)


def _failure(status: int, text: str) -> web.Response:
    return _response(status, _dump({"message": text}), _JSON, nsq=True)


def _not_allowed(methods: dict[str, Handler]) -> web.Response:
    response = _failure(405, "METHOD_NOT_ALLOWED")
    response.headers["Allow"] = _allow(methods)
    return response


def _refused(refusal: Refusal) -> web.Response:
    response = _failure(refusal.status, refusal.text)
    if refusal.challenge:
        response.headers["WWW-Authenticate"] = refusal.challenge
    return response


def _word_of(exc: ShmqError, path: str) -> str:
    """For what nsqd has no limit or no other process; else its own word for a failed publish."""
    if _TABLE_FULL in str(exc):
        return "TOO_MANY_CHANNELS" if path == "/channel/create" else "TOO_MANY_TOPICS"
    return "EXITING"


def _action_of(method: str, path: str) -> tuple[Action, str]:
    """What a request is for, and the option it names."""
    if path == "/ping":
        return Action.PING, ""
    if path.startswith("/debug/"):
        return Action.DEBUG, ""
    if method in ("GET", "HEAD", "OPTIONS"):
        return Action.READ, ""
    if path.startswith("/config/"):
        return Action.CONFIG, path.removeprefix("/config/")
    return Action.WRITE, ""


def _in_chunks(request: web.BaseRequest, response: web.StreamResponse) -> None:
    if request.version >= (1, 1) and "Content-Length" not in response.headers:
        response.enable_chunked_encoding()


def _dump(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _allow(methods: dict[str, Handler]) -> str:
    return ", ".join(sorted([*methods, "OPTIONS"]))


def _params(query: str) -> Params:
    """As Go's url.ParseQuery: the first of a repeated key; HttpError if it cannot be parsed."""
    found: Params = {}
    for part in query.split("&"):
        if not part:
            continue
        if ";" in part or re.search(r"%(?![0-9a-fA-F]{2})", part):
            raise HttpError(400, "INVALID_REQUEST")
        key, _, value = part.partition("=")
        found.setdefault(urllib.parse.unquote_plus(key), urllib.parse.unquote_plus(value))
    return found


def _addresses(body: bytes) -> list[str]:
    """Of nsqlookupds, as JSON. HttpError."""
    try:
        value = json.loads(body)
    except ValueError:
        raise HttpError(400, "INVALID_VALUE") from None
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MOST_LOOKUPDS:
        raise HttpError(400, "INVALID_VALUE")
    if not all(isinstance(item, str) and is_host_and_port(item) for item in value):
        raise HttpError(400, "INVALID_VALUE")
    return value


def _topic(params: Params, invalid: str) -> str:
    topic = params.get("topic")
    if topic is None:
        raise HttpError(400, "MISSING_ARG_TOPIC")
    if not valid_name(topic):
        raise HttpError(400, invalid)
    return topic


def _declared(request: web.BaseRequest, most: int, text: str) -> None:
    if request.content_length is not None and request.content_length > most:
        raise HttpError(413, text, close=True)


async def _read(request: web.BaseRequest, most: int, text: str) -> bytes:
    """The body, of at most so many bytes."""
    _declared(request, most, text)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
    body = bytearray()
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            async for part in request.content.iter_any():
                body += part
                if len(body) > most:
                    raise HttpError(413, text, close=True)
    except TimeoutError:
        raise HttpError(408, "REQUEST_TIMEOUT", close=True) from None
    return bytes(body)


def _binary_bodies(body: bytes, max_msg_size: int, max_body_size: int) -> list[bytes]:
    """As MPUB has them, without the size before all."""
    count = int.from_bytes(body[:4], "big", signed=True)
    if len(body) < 4 or not 0 < count <= (max_body_size - 4) // 5:
        raise HttpError(413, "BAD_BODY")
    _, whole, _ = _native.scan_bodies(body, 4, len(body), count, max_msg_size)
    if whole < count:
        raise HttpError(413, "BAD_MESSAGE")
    messages, at = [], 4
    for _ in range(count):
        size = int.from_bytes(body[at : at + 4], "big")
        messages.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return messages
