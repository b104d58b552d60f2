"""The pages /config/<option>: reading all options, and changing two of them."""

from __future__ import annotations

import logging
from typing import Any, Final

from aiohttp import web

from shmq import audit
from shmq.door import wishes
from shmq.gateway import statsd
from shmq.gateway.access import redacted
from shmq.gateway.context import Context
from shmq.gateway.control import Pending
from shmq.gateway.http_messages import (
    JSON,
    Answer,
    HttpError,
    Params,
    dump,
    read_body,
    reply,
)
from shmq.gateway.listeners import is_host_and_port
from shmq.option_types import Kind, Option, to_ns
from shmq.options import OPTIONS

_MOST_LOOKUPDS: Final = 100
#: Flags without effect; nsqd does not show them.
_NO_OPTIONS: Final = ("verbose", "worker_id")
_LEVELS: Final = ("debug", "info", "warn", "error", "fatal")
_REQUIRED: Final = {"false": 0, "tcp-https": 1, "true": 2}
_TLS_NUMBERS: Final = {"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772}

_log = logging.getLogger(__name__)


class ConfigPages:
    """The handlers of /config/<option>."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def get(self, request: web.BaseRequest, params: Params) -> Answer:
        """Show an option."""
        return self._show(_key_of(request))

    async def put(self, request: web.BaseRequest, params: Params) -> Answer:
        """Change an option in all gateway processes, and show it."""
        key = _key_of(request)
        try:
            body = await read_body(request, self._context.options.max_msg_size, "INVALID_VALUE")
        except HttpError:
            raise HttpError(413, "INVALID_VALUE") from None
        if not body:
            raise HttpError(413, "INVALID_VALUE")
        value = body.decode("utf-8", "replace")
        if key == "nsqlookupd_tcp_addresses":
            change: dict[str, Any] = {"lookupd_tcp_address": _addresses(body)}
        elif key == "log_level":
            if value.lower() not in _LEVELS:
                raise HttpError(400, "INVALID_VALUE")
            change = {"log_level": value.lower()}
        else:
            raise HttpError(400, "INVALID_OPTION")
        try:
            await self._context.control.change(change)
        except Pending as exc:
            audit.note("config", result="pending", option=key, value=value)
            _log.warning("PUT /config/%s: %s", key, exc)
            raise HttpError(503, "CHANGE_PENDING") from None
        except OSError as exc:
            audit.note("config", result="refused", option=key, value=value)
            _log.error("PUT /config/%s: %s", key, exc)
            raise HttpError(500, "INTERNAL_ERROR") from None
        audit.note("config", option=key, value=value)
        return self._show(key)

    def _show(self, key: str) -> Answer:
        option = next((item for item in OPTIONS.values() if item.key == key), None)
        if option is None or key in _NO_OPTIONS:
            raise HttpError(400, "INVALID_OPTION")
        value = self._value(option)
        if isinstance(value, str):
            return redacted(value)
        return reply(200, dump(value), JSON, nsq=True)

    def _value(self, option: Option) -> Any:
        """Return the value of an option as nsqd shows it."""
        options = self._context.options
        value = getattr(options, option.name)
        if option.name == "log_level":
            return _LEVELS.index(value) + 1
        if option.name == "tls_required":
            return _REQUIRED[value] or (2 if options.tls_client_auth_policy else 0)
        if option.name == "tls_min_version":
            return _TLS_NUMBERS[value]
        if option.name == "statsd_prefix":
            return statsd.prefix_of(self._context)
        if option.kind is Kind.DURATION:
            return to_ns(value)
        if option.kind is Kind.MODE:
            return option.show(value)
        if option.kind is Kind.SHARES:  # Go writes 1.0 as 1
            return [int(share) if share.is_integer() else share for share in value]
        if option.kind is Kind.TEXTS:
            return [redacted(item) for item in value]
        return value


def _key_of(request: web.BaseRequest) -> str:
    return request.raw_path.partition("?")[0].rpartition("/")[2]


def _addresses(body: bytes) -> list[str]:
    """Parse the addresses of nsqlookupds, a JSON list. Raises HttpError."""
    try:
        value = wishes.parsed(body)
    except ValueError:
        raise HttpError(400, "INVALID_VALUE") from None
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MOST_LOOKUPDS:
        raise HttpError(400, "INVALID_VALUE")
    if not all(isinstance(item, str) and is_host_and_port(item) for item in value):
        raise HttpError(400, "INVALID_VALUE")
    return value
