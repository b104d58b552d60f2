"""Every option of the broker, once: name, unit, default, bounds, help.

`Options` is what everything else reads. The command line, the configuration file and the keywords
of `shmq.Broker` are three ways to fill it, all derived from the fields below. Names, units and
defaults of nsqd's options are nsqd's (`nsqd/options.go`, `apps/nsqd/options.go`), but for those
whose nsqd default is not safe (`nsqd_default`): these are nsqd's only for `shmq serve --nsqd`.

Durations are seconds (float) in an `Options`. On the command line they need a unit (`60s`), in a
TOML file a bare number means milliseconds, both as nsqd has it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import grp
import hashlib
import math
import os
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmq.names import check_instance
from shmq.segments import NO_GROUP, default_instance

#: What the allocator adds to a body, and the unit it rounds to (layout.h: SHMQ_ARENA_HEAD, _UNIT).
ARENA_HEAD = 16
ARENA_UNIT = 64

#: Share of `arena_size` that one message may take; the rest is for those in flight.
ARENA_SHARE = 0.75

#: Slots a queue may have, and bytes of its bodies (segment.c).
MAX_SLOTS = 1 << 23
MAX_ARENA = 1 << 38

#: Topics that the directory has room for (layout.h: SHMQ_TOPICS).
MAX_TOPICS = 16384

_TRANSIT = 256
_MAX_INT32 = (1 << 31) - 1
_MAX_DURATION = float(1 << 33)  # ns still fit int64


class Kind(enum.Enum):
    """What an option's value is, and so how text becomes one."""

    TEXT = "string"
    WORD = "word"
    COUNT = "int"
    BYTES = "bytes"
    DURATION = "duration"
    MODE = "mode"
    SWITCH = "bool"
    TEXTS = "strings"
    SHARES = "floats"

    @property
    def repeats(self) -> bool:
        """Whether the flag may be given several times; the value is a tuple."""
        return self in (Kind.TEXTS, Kind.SHARES)


class OptionError(ValueError):
    """A value is not of the option's kind or out of its bounds."""


@dataclass(frozen=True)
class Option:
    """One field of `Options`, as the command line, the file and the manual need it."""

    name: str
    """Field and keyword: `mem_queue_size`."""
    flag: str
    """`--mem-queue-size`."""
    key: str
    """In a TOML file; as the field but where nsqd differs (`id` for node_id)."""
    kind: Kind
    help: str
    group: str
    """Heading in the manual: "broker", "memory", "delivery", "disk", "scan", "log", "gateway"."""
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    nsqd: bool
    """Whether nsqd has it too."""
    env: str | None
    nsqd_default: Any
    """nsqd's default where it is not ours, for `shmq serve --nsqd`; None: it is ours."""
    reload: bool
    """Whether SIGHUP gives a running broker its new value."""

    @property
    def default(self) -> Any:
        """The default, worked out now (node_id's comes from the host name)."""
        return getattr(Options(), self.name)

    @property
    def default_words(self) -> str | None:
        """What the default is made from, if it is not the same on every machine."""
        return _MADE_FROM.get(self.name)

    def parse(self, text: str) -> Any:
        """The value that the command line's text means. OptionError."""
        if self.kind is Kind.DURATION:
            return self.check(_parse_duration(self.flag, text))
        return self.check(self._convert(self.flag, text))

    def parse_all(self, texts: Sequence[str]) -> Any:
        """The value that the texts of a flag mean, as often as it was given. OptionError."""
        if not self.kind.repeats:
            return self.parse(texts[-1])
        items = [item for text in texts for item in self._convert(self.flag, text)]
        # nsqd keeps percentiles in falling order
        return self.check(sorted(items, reverse=True) if self.kind is Kind.SHARES else items)

    def from_config(self, value: Any) -> Any:
        """The value that a TOML file's value means: strings as on the command line, a bare number
        of a duration in milliseconds. OptionError."""
        if isinstance(value, str):
            return self.parse(value)
        if self.kind is Kind.DURATION and _is_number(value):
            return self.check(value / 1000)
        if self.kind in (Kind.TEXT, Kind.WORD) and isinstance(value, int):
            # group = 990, tls_required = true
            return self.check(str(value).lower() if isinstance(value, bool) else str(value))
        return self.check(value)

    def check(self, value: Any) -> Any:
        """The value as `Options` holds it (text of a keyword is read as on the command line).
        OptionError naming the bounds."""
        if self.kind in (Kind.TEXT, Kind.WORD):
            return self._check_text(value)
        if isinstance(value, str) and self.kind is Kind.DURATION:
            return self.check(_parse_duration(self.name, value))
        if isinstance(value, str):
            return self.check(self._convert(self.name, value))
        if self.kind is Kind.SWITCH:
            if not isinstance(value, bool):
                raise OptionError(f"{self.name} must be true or false, not {value!r}")
            return value
        if self.kind.repeats:
            return self._check_many(value)
        if self.kind is Kind.DURATION:
            if not _is_number(value):
                raise OptionError(f"{self.name} must be seconds, not {value!r}")
            value = float(value)
        elif isinstance(value, bool) or not hasattr(value, "__index__"):
            raise OptionError(f"{self.name} must be a whole number, not {value!r}")
        else:
            value = value.__index__()
        if (self.low is not None and value < self.low) or (
            self.high is not None and value > self.high
        ):
            raise OptionError(
                f"{self.name} must be from {self.show(self.low)} to {self.show(self.high)}, "
                f"not {self.show(value)}"
            )
        return value

    def show_safely(self, value: Any) -> str:
        """`show` for a log: without passwords in addresses, and without secrets at all."""
        if _SECRET.search(self.name) and value:
            return "***"
        text = re.sub(r"//[^/@,]*@", "//***@", self.show(value))
        return re.sub(r"\?[^,]*", "?***", text) if self.kind is Kind.TEXTS else text

    def show(self, value: Any) -> str:
        """The value as it is written on the command line."""
        if self.kind is Kind.DURATION:
            return format_duration(value)
        if self.kind is Kind.MODE:
            return f"{value:04o}"
        if self.kind is Kind.SWITCH:
            return str(value).lower()
        if self.kind.repeats:
            return ",".join(f"{item:g}" if isinstance(item, float) else item for item in value)
        return str(value)

    def _check_many(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise OptionError(f"{self.name} must be a list, not {value!r}")
        if self.kind is Kind.TEXTS:
            return tuple(self._check_text(item) for item in value)
        for item in value:
            if not _is_number(item) or not 0 < item <= 1:
                raise OptionError(f"{self.name} must be numbers above 0 and up to 1, not {item!r}")
        return tuple(float(item) for item in value)

    def _check_text(self, value: Any) -> str:
        try:
            text = os.fspath(value)
        except TypeError:
            text = None
        if not isinstance(text, str):
            raise OptionError(f"{self.name} must be text, not {value!r}")
        if "\0" in text:
            raise OptionError(f"{self.name} must not hold a zero byte")
        if not self.choices:
            return text
        word = text.lower()  # as nsqd's, in any letter case
        if word not in self.choices and "true" in self.choices and text in _SWITCH:
            word = str(_SWITCH[text]).lower()
        if word not in self.choices:
            raise OptionError(f"{self.name} must be one of {', '.join(self.choices)}, not {text!r}")
        return word

    def _convert(self, what: str, text: str) -> Any:
        if self.kind in (Kind.TEXT, Kind.WORD):
            return text
        if self.kind is Kind.SWITCH:
            if text not in _SWITCH:
                raise OptionError(f"{what} must be true or false, not {text!r}")
            return _SWITCH[text]
        if self.kind is Kind.TEXTS:
            return [text] if text else []
        if self.kind is Kind.SHARES:
            if not text:
                return []
            try:
                return sorted((float(part) for part in text.split(",")), reverse=True)
            except ValueError:
                raise OptionError(f"{what} must be numbers, not {text!r}") from None
        base = 8 if self.kind is Kind.MODE else 10
        if not re.fullmatch(r"[+-]?[0-7]+" if base == 8 else r"[+-]?[0-9]+", text):
            number = "an octal number such as 0660" if base == 8 else "a whole number"
            raise OptionError(f"{what} must be {number}, not {text!r}")
        return int(text, base)


_SECRET = re.compile(r"secret|token|password")

#: Go's strconv.ParseBool
_SWITCH = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True)
_SWITCH |= dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))
    )


# ---- durations ----

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
_UNITS |= {"m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern})+)")


def parse_duration(text: str) -> float:
    """Seconds that a duration in Go's notation means: `60s`, `100ms`, `1h15m`.

    ValueError without a unit (only `0` may go without), as nsqd's flags.
    """
    if text in ("0", "+0", "-0"):
        return 0.0
    match = _DURATION.fullmatch(text)
    if match is None:
        hint = " (it needs a unit: s, ms, m, h)" if re.fullmatch(r"[+-]?[0-9.]+", text) else ""
        raise ValueError(f"{text!r} is not a duration such as 60s, 100ms or 1h15m{hint}")
    ns = 0
    for number, unit in _PART.findall(match[2]):
        whole, _, fraction = number.partition(".")
        ns += int(whole or 0) * _UNITS[unit]
        ns += int(fraction or 0) * _UNITS[unit] // 10 ** len(fraction)
    return (-ns if match[1] == "-" else ns) / 1e9


def _parse_duration(what: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise OptionError(f"{what}: {exc}") from None


def format_duration(seconds: float) -> str:
    """The shortest single-unit notation that means exactly this: `60s`, `100ms`, `15m`."""
    ns = to_ns(seconds)
    if ns == 0:
        return "0s"
    for unit in ("h", "m", "s", "ms", "us"):
        if ns % _UNITS[unit] == 0:
            if unit == "m" and abs(ns) < 120 * 10**9:
                continue  # 60s reads better than 1m
            return f"{ns // _UNITS[unit]}{unit}"
    return f"{ns}ns"


def to_ns(seconds: float) -> int:
    """Nanoseconds, as the extension takes them."""
    return round(seconds * 1e9)


# ---- the options ----


def default_node_id() -> int:
    """nsqd's: CRC-32 of the 16 bytes of MD5(host name), modulo 1024."""
    digest = hashlib.md5(socket.gethostname().encode(), usedforsecurity=False).digest()
    return zlib.crc32(digest) % 1024


_MADE_FROM = {
    "node_id": "from the host name",
    "broadcast_address": "the host name",
    "gateway_workers": "one per 2 cores",
}


#: Keywords of others' queues -> the end of the sentence that says what is here instead.
_OTHERS_NAMES = dict.fromkeys(
    ("maxsize", "max_size", "maxlen", "max_len", "limit"),
    ": mem_queue_size is how many messages of a topic or channel wait in memory; more wait on disk",
)


def default_gateway_workers() -> int:
    """One per 2 cores that this process may use, at least 1."""
    return max(len(os.sched_getaffinity(0)) // 2, 1)


def _option(
    default: Any,
    kind: Kind,
    help: str,
    *,
    group: str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    nsqd: bool = True,
    key: str | None = None,
    env: str | None = None,
    nsqd_default: Any = None,
    reload: bool = False,
) -> Any:
    metadata = {
        "kind": kind,
        "help": help,
        "group": group,
        "low": low,
        "high": high,
        "choices": choices,
        "nsqd": nsqd,
        "key": key,
        "env": env,
        "nsqd_default": nsqd_default,
        "reload": reload,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """What a broker was told. Checked when made: OptionError (a ValueError) naming the bounds."""

    instance: str = _option(
        default_instance,
        Kind.TEXT,
        "name of the broker on this host; clients find it by this",
        group="broker",
        nsqd=False,
        env="SHMQ_INSTANCE",
    )
    data_path: str = _option(
        "",
        Kind.TEXT,
        "directory for what does not fit in memory; must exist (empty: the current directory)",
        group="broker",
    )
    node_id: int = _option(
        default_node_id,
        Kind.COUNT,
        "unique part of message ids",
        group="broker",
        low=0,
        high=1023,
        key="id",
    )
    group: str = _option(
        "",
        Kind.TEXT,
        "name or number of a group whose members may attach too (empty: only this user); they can "
        "then run code as this user and as everybody who attaches",
        group="broker",
        nsqd=False,
    )
    mode: int = _option(
        0,
        Kind.MODE,
        "permissions of the shared memory, octal (0: 0600, with --group 0660)",
        group="broker",
        low=0,
        high=0o666,
        nsqd=False,
    )
    on_stop: str = _option(
        "flush",
        Kind.WORD,
        "at SIGTERM: flush everything to disk, or keep it in shared memory for the next supervisor",
        group="broker",
        choices=("flush", "keep"),
        nsqd=False,
    )

    mem_queue_size: int = _option(
        10000,
        Kind.COUNT,
        "messages to keep in memory per topic and per channel",
        group="memory",
        low=0,
        high=MAX_SLOTS - _TRANSIT,
    )
    inflight_slots: int = _option(
        16384,
        Kind.COUNT,
        "messages per channel that may be in flight, requeued or deferred in memory",
        group="memory",
        low=16,
        high=MAX_SLOTS - _TRANSIT,
        nsqd=False,
    )
    arena_size: int = _option(
        64 << 20,
        Kind.BYTES,
        "bytes of message bodies in memory per topic and per channel, at most; if not given, more "
        "where max_msg_size needs it",
        group="memory",
        low=64 << 10,
        high=MAX_ARENA,
        nsqd=False,
    )
    max_msg_size: int = _option(
        1 << 20,
        Kind.BYTES,
        "largest message body; must fit 3/4 of arena_size",
        group="memory",
        low=1,
        high=_MAX_INT32 - 30,
    )
    max_body_size: int = _option(
        5 << 20,
        Kind.BYTES,
        "largest body of one command (MPUB, IDENTIFY, AUTH)",
        group="memory",
        low=1,
        high=_MAX_INT32,
        reload=True,
    )

    max_topics: int = _option(
        MAX_TOPICS,
        Kind.COUNT,
        "topics there may be; who asks for one more is refused",
        group="memory",
        low=1,
        high=MAX_TOPICS,
        nsqd=False,
    )

    msg_timeout: float = _option(
        60.0,
        Kind.DURATION,
        "time a consumer has to finish a message before it is handed out again",
        group="delivery",
        low=0.001,
        high=_MAX_DURATION,
    )
    max_msg_timeout: float = _option(
        900.0,
        Kind.DURATION,
        "longest message timeout a consumer may ask for, touches included",
        group="delivery",
        low=0.001,
        high=_MAX_DURATION,
    )
    max_req_timeout: float = _option(
        3600.0,
        Kind.DURATION,
        "longest delay of a requeued or deferred message",
        group="delivery",
        low=0.0,
        high=_MAX_DURATION,
    )

    max_bytes_per_file: int = _option(
        100 << 20,
        Kind.BYTES,
        "bytes per file on disk before the next one is begun",
        group="disk",
        low=1,
        high=(1 << 40) - 1,
    )
    sync_every: int = _option(
        2500,
        Kind.COUNT,
        "messages per fsync",
        group="disk",
        low=1,
        high=1 << 62,
    )
    sync_timeout: float = _option(
        2.0,
        Kind.DURATION,
        "time between fsyncs",
        group="disk",
        low=0.001,
        high=_MAX_DURATION,
    )

    queue_scan_interval: float = _option(
        0.1,
        Kind.DURATION,
        "time between two looks for timed out and due messages",
        group="scan",
        low=0.001,
        high=3600.0,
        nsqd=False,
    )
    queue_scan_refresh_interval: float = _option(
        5.0,
        Kind.DURATION,
        "time between two refreshes of the list of channels and the number of workers",
        group="scan",
        low=0.001,
        high=3600.0,
        nsqd=False,
    )
    queue_scan_selection_count: int = _option(
        20,
        Kind.COUNT,
        "channels to check at random in each interval",
        group="scan",
        low=1,
        high=1 << 20,
    )
    queue_scan_worker_pool_max: int = _option(
        4,
        Kind.COUNT,
        "largest number of scan workers",
        group="scan",
        low=1,
        high=256,
    )
    queue_scan_dirty_percent: int = _option(
        25,
        Kind.COUNT,
        "percentage of channels with something to do that makes the scan repeat at once",
        group="scan",
        low=0,
        high=100,
        nsqd=False,
    )

    log_level: str = _option(
        "info",
        Kind.WORD,
        "what to log",
        group="log",
        choices=("debug", "info", "warn", "error", "fatal"),
        reload=True,
    )
    log_format: str = _option(
        "text",
        Kind.WORD,
        "lines as nsqd writes them, or one JSON object a line",
        group="log",
        choices=("text", "json"),
        nsqd=False,
    )
    log_prefix: str = _option(
        "[nsqd] ",
        Kind.TEXT,
        "what every line of the log begins with (text)",
        group="log",
    )

    audit_log: str = _option(
        "stderr",
        Kind.TEXT,
        "where to write who created, deleted, emptied, paused, configured, or failed to log in: "
        "stderr (with the log, at every level), or a file (empty: nowhere)",
        group="log",
        nsqd=False,
    )

    gateway_workers: int = _option(
        default_gateway_workers,
        Kind.COUNT,
        "processes that serve clients on TCP and HTTP",
        group="gateway",
        low=1,
        high=64,
        nsqd=False,
    )
    tcp_address: str = _option(
        "127.0.0.1:4150",
        Kind.TEXT,
        "<addr>:<port> or path of a Unix socket for TCP clients (empty: none)",
        group="gateway",
        nsqd_default="0.0.0.0:4150",
    )
    http_address: str = _option(
        "127.0.0.1:4151",
        Kind.TEXT,
        "<addr>:<port> or path of a Unix socket for HTTP clients (empty: none)",
        group="gateway",
        nsqd_default="0.0.0.0:4151",
    )
    https_address: str = _option(
        "127.0.0.1:4152",
        Kind.TEXT,
        "<addr>:<port> for HTTPS clients; used only with a certificate (empty: none)",
        group="gateway",
        nsqd_default="0.0.0.0:4152",
    )
    http_writes: bool = _option(
        True,
        Kind.SWITCH,
        "answer HTTP requests that publish, create, delete, empty or pause",
        group="gateway",
        nsqd=False,
        reload=True,
    )
    http_config: str = _option(
        "true",
        Kind.WORD,
        "what PUT /config may change: all that nsqd has, only log_level, or nothing",
        group="gateway",
        choices=("true", "log_level", "false"),
        nsqd=False,
        reload=True,
    )
    http_debug: str = _option(
        "loopback",
        Kind.WORD,
        "who may ask for /debug: processes of this host, everybody, or nobody",
        group="gateway",
        choices=("loopback", "true", "false"),
        nsqd=False,
        reload=True,
    )
    http_token_file: str = _option(
        "",
        Kind.TEXT,
        "file with a bearer token a line, one of which HTTP requests need that write, configure or "
        "debug (empty: SHMQ_HTTP_TOKEN's, if it is set)",
        group="gateway",
        nsqd=False,
        reload=True,
    )
    http_open_reads: bool = _option(
        True,
        Kind.SWITCH,
        "whether HTTP requests that only read need no token (/ping never does)",
        group="gateway",
        nsqd=False,
        reload=True,
    )
    http_allowed_hosts: tuple[str, ...] = _option(
        (),
        Kind.TEXTS,
        "a further name that browsers and proxies may use for this server on HTTP; *: any (may be "
        "given several times)",
        group="gateway",
        nsqd=False,
        reload=True,
    )
    broadcast_address: str = _option(
        socket.gethostname,
        Kind.TEXT,
        "address that is told to nsqlookupd",
        group="gateway",
    )
    broadcast_tcp_port: int = _option(
        0,
        Kind.COUNT,
        "TCP port that is told to nsqlookupd (0: the one listened on)",
        group="gateway",
        low=0,
        high=65535,
    )
    broadcast_http_port: int = _option(
        0,
        Kind.COUNT,
        "HTTP port that is told to nsqlookupd (0: the one listened on)",
        group="gateway",
        low=0,
        high=65535,
    )
    lookupd_tcp_address: tuple[str, ...] = _option(
        (),
        Kind.TEXTS,
        "an nsqlookupd's TCP address (may be given several times)",
        group="gateway",
        key="nsqlookupd_tcp_addresses",
        reload=True,
    )
    auth_http_address: tuple[str, ...] = _option(
        (),
        Kind.TEXTS,
        "an authorisation server's <addr>:<port> or URL (may be given several times)",
        group="gateway",
        key="auth_http_addresses",
        reload=True,
    )
    auth_http_request_method: str = _option(
        "get",
        Kind.WORD,
        "HTTP method for authorisation servers",
        group="gateway",
        choices=("get", "post"),
        reload=True,
    )
    http_client_connect_timeout: float = _option(
        2.0,
        Kind.DURATION,
        "longest time to connect to an authorisation server or nsqlookupd's HTTP",
        group="gateway",
        low=0.001,
        high=_MAX_DURATION,
    )
    http_client_request_timeout: float = _option(
        5.0,
        Kind.DURATION,
        "longest time for a request to them",
        group="gateway",
        low=0.001,
        high=_MAX_DURATION,
    )
    topology_region: str = _option(
        "",
        Kind.TEXT,
        "region that is told to nsqlookupd and clients",
        group="gateway",
    )
    topology_zone: str = _option(
        "",
        Kind.TEXT,
        "zone that is told to nsqlookupd and clients",
        group="gateway",
    )
    max_heartbeat_interval: float = _option(
        60.0,
        Kind.DURATION,
        "longest heartbeat interval a client may ask for",
        group="gateway",
        low=0.001,
        high=_MAX_DURATION,
        reload=True,
    )
    max_rdy_count: int = _option(
        2500,
        Kind.COUNT,
        "highest RDY count of a client",
        group="gateway",
        low=0,
        high=_MAX_INT32,
        reload=True,
    )
    max_output_buffer_size: int = _option(
        64 << 10,
        Kind.BYTES,
        "largest output buffer a client may ask for",
        group="gateway",
        low=64,
        high=_MAX_INT32,
        reload=True,
    )
    max_output_buffer_timeout: float = _option(
        30.0,
        Kind.DURATION,
        "longest time between two flushes to a client that it may ask for",
        group="gateway",
        low=0.0,
        high=_MAX_DURATION,
        reload=True,
    )
    min_output_buffer_timeout: float = _option(
        0.025,
        Kind.DURATION,
        "shortest time between two flushes to a client that it may ask for",
        group="gateway",
        low=0.0,
        high=_MAX_DURATION,
        reload=True,
    )
    output_buffer_timeout: float = _option(
        0.25,
        Kind.DURATION,
        "time between two flushes to a client that did not ask",
        group="gateway",
        low=0.001,
        high=_MAX_DURATION,
        reload=True,
    )
    max_channel_consumers: int = _option(
        0,
        Kind.COUNT,
        "most consumers of a channel (0: any number)",
        group="gateway",
        low=0,
        high=_MAX_INT32,
        reload=True,
    )
    max_connections: int = _option(
        0,
        Kind.COUNT,
        "most TCP connections of one gateway process, as far as its descriptors allow: HTTP and "
        "topics have a reserve (0: only that)",
        group="gateway",
        low=0,
        high=_MAX_INT32,
        nsqd=False,
        reload=True,
    )
    max_connections_per_address: int = _option(
        0,
        Kind.COUNT,
        "most of them from one IP address (0: any number)",
        group="gateway",
        low=0,
        high=_MAX_INT32,
        nsqd=False,
        reload=True,
    )
    max_buffered_bytes: int = _option(
        1 << 30,
        Kind.BYTES,
        "bytes of unfinished commands and unread output that the TCP connections of one gateway "
        "process may hold together; beyond it the one with the most is ended",
        group="gateway",
        low=1 << 20,
        high=1 << 50,
        nsqd=False,
        reload=True,
    )
    statsd_address: str = _option(
        "",
        Kind.TEXT,
        "UDP <addr>:<port> of a statsd server (empty: none)",
        group="gateway",
    )
    statsd_interval: float = _option(
        60.0,
        Kind.DURATION,
        "time between two pushes to statsd",
        group="gateway",
        low=1.001,
        high=_MAX_DURATION,
    )
    statsd_mem_stats: bool = _option(
        True,
        Kind.SWITCH,
        "send memory statistics to statsd",
        group="gateway",
    )
    statsd_prefix: str = _option(
        "nsq.%s",
        Kind.TEXT,
        "what statsd names begin with; %s: the broadcast address and HTTP port",
        group="gateway",
    )
    statsd_udp_packet_size: int = _option(
        508,
        Kind.BYTES,
        "largest datagram to statsd",
        group="gateway",
        low=64,
        high=65507,
    )
    statsd_exclude_ephemeral: bool = _option(
        False,
        Kind.SWITCH,
        "leave ephemeral topics and channels out of what statsd gets",
        group="gateway",
    )
    e2e_processing_latency_percentile: tuple[float, ...] = _option(
        (),
        Kind.SHARES,
        "shares of messages whose time from publish to finish is shown, as 0.99 or 1.0,0.95",
        group="gateway",
        key="e2e_processing_latency_percentiles",
    )
    e2e_processing_latency_window_time: float = _option(
        600.0,
        Kind.DURATION,
        "accepted as nsqd's; the time looked at is always 5 to 10 minutes",
        group="gateway",
        low=0.001,
        high=_MAX_DURATION,
    )
    tls_cert: str = _option("", Kind.TEXT, "certificate file (PEM)", group="gateway", reload=True)
    tls_key: str = _option("", Kind.TEXT, "private key file (PEM)", group="gateway", reload=True)
    tls_client_auth_policy: str = _option(
        "",
        Kind.TEXT,
        "what client certificates must be: `require` (any) or `require-verify`",
        group="gateway",
        reload=True,
    )
    tls_root_ca_file: str = _option(
        "",
        Kind.TEXT,
        "certificates (PEM) that clients' are verified with, and authorisation servers'",
        group="gateway",
        reload=True,
    )
    tls_required: str = _option(
        "false",
        Kind.WORD,
        "whether clients must use TLS; tcp-https: but not on HTTP",
        group="gateway",
        choices=("false", "true", "tcp-https"),
        reload=True,
    )
    tls_min_version: str = _option(
        "tls1.2",
        Kind.WORD,
        "lowest TLS version",
        group="gateway",
        choices=("tls1.0", "tls1.1", "tls1.2", "tls1.3"),
        nsqd_default="tls1.0",
        reload=True,
    )
    deflate: bool = _option(
        True, Kind.SWITCH, "allow clients to ask for deflate", group="gateway", reload=True
    )
    max_deflate_level: int = _option(
        6,
        Kind.COUNT,
        "highest deflate level a client may ask for",
        group="gateway",
        low=1,
        high=9,
        reload=True,
    )
    snappy: bool = _option(
        True, Kind.SWITCH, "allow clients to ask for snappy", group="gateway", reload=True
    )
    enable_experiment: tuple[str, ...] = _option(
        (),
        Kind.TEXTS,
        "accepted as nsqd's; there are no experiments",
        group="gateway",
    )
    verbose: bool = _option(False, Kind.SWITCH, "accepted as nsqd's; no effect", group="log")
    worker_id: bool = _option(
        False, Kind.SWITCH, "accepted as nsqd's; no effect (use --node-id)", group="log"
    )

    def __post_init__(self) -> None:
        for option in OPTIONS.values():
            object.__setattr__(self, option.name, option.check(getattr(self, option.name)))
        check_instance(self.instance)
        slots = max(self.mem_queue_size, _TRANSIT) + self.inflight_slots
        if slots > MAX_SLOTS:
            raise OptionError(
                f"mem_queue_size and inflight_slots together may be at most {MAX_SLOTS}, "
                f"not {slots}"
            )
        room = int(self.arena_size * ARENA_SHARE) // ARENA_UNIT * ARENA_UNIT - ARENA_HEAD
        if self.max_msg_size > room:
            raise OptionError(
                f"max_msg_size {self.max_msg_size} does not fit arena_size {self.arena_size}: one "
                f"message may take 3/4 of it, here {room} bytes. Lower max_msg_size or raise "
                f"arena_size to {arena_size_for(self.max_msg_size)}"
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Options:
        """Options as `shmq.Broker` takes them; None means the default.

        TypeError for an unknown keyword, with the ones that come close; OptionError.
        """
        unknown = [name for name in keywords if name not in OPTIONS]
        if unknown:
            close = difflib.get_close_matches(unknown[0], OPTIONS, n=3)
            hint = f": did you mean {' or '.join(close)}?" if close else ""
            hint = _OTHERS_NAMES.get(unknown[0], hint)
            raise TypeError(f"there is no option {unknown[0]!r}{hint}")
        return cls._of({name: value for name, value in keywords.items() if value is not None})

    @classmethod
    def load(
        cls,
        flags: Mapping[str, str | Sequence[str] | None],
        config: Mapping[str, Any] | None = None,
        *,
        nsqd: bool = False,
    ) -> Options:
        """Options as `shmq serve` takes them: flag, else configuration file, else default.

        flags: texts by field name, None where not given, several of what repeats. config: a
        TOML document; see `unknown_keys` for those that are no option. nsqd: nsqd's defaults, and
        an instance named after the data path if none is given. OptionError.
        """
        values: dict[str, Any] = {}
        for option in OPTIONS.values():
            text = flags.get(option.name)
            if text:
                texts = [text] if isinstance(text, str) else text
                values[option.name] = option.parse_all(texts)
            elif text == "":
                values[option.name] = option.parse(text)
            elif config is not None and option.key in config:
                values[option.name] = option.from_config(config[option.key])
            elif nsqd and option.nsqd_default is not None:
                values[option.name] = option.nsqd_default
        if nsqd and "instance" not in values:
            values["instance"] = instance_of(values.get("data_path", ""))
        return cls._of(values)

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Options:
        """These and defaults. The arena grows with max_msg_size, so that nsqd's flags are enough:
        it is only address space until bodies come."""
        if "max_msg_size" in values and "arena_size" not in values:
            largest = OPTIONS["max_msg_size"].check(values["max_msg_size"])
            default = OPTIONS["arena_size"].default
            values = {**values, "arena_size": max(default, arena_size_for(largest))}
        return cls(**values)

    def replace(self, **changes: Any) -> Options:
        """A copy with some values changed. OptionError."""
        return dataclasses.replace(self, **changes)

    def differing(self, nsqd: bool = False) -> list[str]:
        """`name=value` of what is not the default (or not nsqd's), fit for a log."""
        default = Options.load({}, nsqd=nsqd)
        return [
            f"{option.name}={option.show_safely(value)}"
            for option in OPTIONS.values()
            for value in [getattr(self, option.name)]
            if value != getattr(default, option.name)
        ]

    def changes(self, new: Options) -> tuple[dict[str, Any], list[str]]:
        """What is another in `new`: of options that a running broker takes, {name: value}; and the
        names of those that it would have to be started again for."""
        differ = {
            option.name: getattr(new, option.name)
            for option in OPTIONS.values()
            if getattr(new, option.name) != getattr(self, option.name)
        }
        taken = {name: value for name, value in differ.items() if OPTIONS[name].reload}
        return taken, [name for name in differ if name not in taken]

    def to_argv(self) -> list[str]:
        """Flags for `python -m shmq serve` that say all that is not default, and the instance."""
        default = Options()
        argv = []
        for option in OPTIONS.values():
            value = getattr(self, option.name)
            if option.kind is Kind.TEXTS:
                argv += [f"{option.flag}={item}" for item in value]
            elif option.name == "instance" or value != getattr(default, option.name):
                argv.append(f"{option.flag}={option.show(value)}")
        return argv

    def to_json(self) -> dict[str, Any]:
        """All values by TOML key, durations in nanoseconds, as nsqd's HTTP shows them."""
        return {
            option.key: to_ns(value) if option.kind is Kind.DURATION else value
            for option in OPTIONS.values()
            for value in [getattr(self, option.name)]
        }

    def limits(self) -> dict[str, int]:
        """Keywords of the extension's create_directory, supervise and (with `queue_limits`)
        queue_bytes. Times in nanoseconds."""
        return {
            "msg_timeout": to_ns(self.msg_timeout),
            "max_msg_timeout": to_ns(self.max_msg_timeout),
            "max_req_timeout": to_ns(self.max_req_timeout),
            "max_msg_size": self.max_msg_size,
            "node_id": self.node_id,
            **self.queue_limits(),
        }

    def queue_limits(self) -> dict[str, int]:
        """Keywords of the extension's queue_bytes."""
        return {
            "arena_size": self.arena_size,
            "mem_queue_size": self.mem_queue_size,
            "inflight_slots": self.inflight_slots,
        }

    def permissions(self) -> tuple[int, int]:
        """Mode and gid (or segments.NO_GROUP) for every shared memory object. OptionError if there
        is no such group."""
        if not self.group:
            return self.mode or 0o600, NO_GROUP
        try:
            gid = int(self.group) if self.group.isdecimal() else grp.getgrnam(self.group).gr_gid
        except KeyError:
            raise OptionError(f"group {self.group!r} is not known on this host") from None
        return self.mode or 0o660, gid


def instance_of(data_path: str) -> str:
    """The name of a drop-in's instance that was not given any: each data path has its own, which
    is the same after a restart. nsqd has no names; what keeps two of them apart is the path."""
    real = os.path.realpath(data_path or ".")
    return f"nsqd-{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each key of a TOML document that is no option, with those that come close."""
    keys = {option.key for option in OPTIONS.values()}
    return [f"there is no option {key!r}{_hint(key, keys)}" for key in config if key not in keys]


def _hint(name: str, known: Iterable[str]) -> str:
    """A question that names what comes close to a name that is not known; empty if nothing does."""
    option = OPTIONS.get(name.replace("-", "_"))
    close = [option.key] if option is not None else difflib.get_close_matches(name, known, n=3)
    return f": did you mean {' or '.join(close)}?" if close else ""


def arena_size_for(max_msg_size: int) -> int:
    """The smallest arena_size (of whole MiB) in which a message of this size fits."""
    need = math.ceil((max_msg_size + ARENA_HEAD + ARENA_UNIT) / ARENA_SHARE)
    return -(-need // (1 << 20)) << 20


def _options() -> Iterator[Option]:
    for item in dataclasses.fields(Options):
        metadata = dict(item.metadata)
        metadata["key"] = metadata["key"] or item.name
        yield Option(name=item.name, flag=f"--{item.name.replace('_', '-')}", **metadata)


#: Every option by field name, in the order of the manual.
OPTIONS: dict[str, Option] = {option.name: option for option in _options()}
