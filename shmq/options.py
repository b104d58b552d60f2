"""Every option of the broker, once: name, unit, default, bounds, help.

`Options` is what everything else reads. The command line, the configuration file and the keywords
of `shmq.Broker` are three ways to fill it, all derived from the fields below. Names, units and
defaults of nsqd's options are nsqd's (`nsqd/options.go`, `apps/nsqd/options.go`).

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
from collections.abc import Iterator, Mapping
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
    """Heading in the manual: "broker", "memory", "delivery", "disk", "scan", "log"."""
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    nsqd: bool
    """Whether nsqd has it too."""
    env: str | None

    @property
    def default(self) -> Any:
        """The default, worked out now (node_id's comes from the host name)."""
        return getattr(Options(), self.name)

    def parse(self, text: str) -> Any:
        """The value that the command line's text means. OptionError."""
        if self.kind is Kind.DURATION:
            return self.check(_parse_duration(self.flag, text))
        return self.check(self._convert(self.flag, text))

    def from_config(self, value: Any) -> Any:
        """The value that a TOML file's value means: strings as on the command line, a bare number
        of a duration in milliseconds. OptionError."""
        if isinstance(value, str):
            return self.parse(value)
        if self.kind is Kind.DURATION and _is_number(value):
            return self.check(value / 1000)
        if self.kind is Kind.TEXT and isinstance(value, int) and not isinstance(value, bool):
            return self.check(str(value))  # group = 990
        return self.check(value)

    def check(self, value: Any) -> Any:
        """The value as `Options` holds it (text of a keyword is read as on the command line).
        OptionError naming the bounds."""
        if self.kind in (Kind.TEXT, Kind.WORD):
            return self._check_text(value)
        if isinstance(value, str):
            return self.parse(value)
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

    def show(self, value: Any) -> str:
        """The value as it is written on the command line."""
        if self.kind is Kind.DURATION:
            return format_duration(value)
        if self.kind is Kind.MODE:
            return f"{value:04o}"
        return str(value)

    def _check_text(self, value: Any) -> str:
        try:
            text = os.fspath(value)
        except TypeError:
            text = None
        if not isinstance(text, str):
            raise OptionError(f"{self.name} must be text, not {value!r}")
        if "\0" in text:
            raise OptionError(f"{self.name} must not hold a zero byte")
        if self.choices and text not in self.choices:
            raise OptionError(f"{self.name} must be one of {', '.join(self.choices)}, not {text!r}")
        return text

    def _convert(self, what: str, text: str) -> Any:
        if self.kind in (Kind.TEXT, Kind.WORD):
            return text
        base = 8 if self.kind is Kind.MODE else 10
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise OptionError(f"{what} must be a whole number, not {text!r}")
        try:
            return int(text, base)
        except ValueError:
            raise OptionError(f"{what} must be an octal number, not {text!r}") from None


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
        "name or number of a group whose members may attach too (empty: only this user)",
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
            raise TypeError(f"there is no option {unknown[0]!r}{hint}")
        return cls._of({name: value for name, value in keywords.items() if value is not None})

    @classmethod
    def load(
        cls,
        flags: Mapping[str, str | None],
        config: Mapping[str, Any] | None = None,
    ) -> Options:
        """Options as `shmq serve` takes them: flag, else configuration file, else default.

        flags: texts by field name, None where not given. config: a TOML document; keys that are no
        option are ignored, as nsqd does. OptionError.
        """
        values: dict[str, Any] = {}
        for option in OPTIONS.values():
            text = flags.get(option.name)
            if text is not None:
                values[option.name] = option.parse(text)
            elif config is not None and option.key in config:
                values[option.name] = option.from_config(config[option.key])
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

    def to_argv(self) -> list[str]:
        """Flags for `python -m shmq serve` that say all that is not default, and the instance."""
        default = Options()
        argv = []
        for option in OPTIONS.values():
            value = getattr(self, option.name)
            if option.name == "instance" or value != getattr(default, option.name):
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
