"""One option of the broker: its type, its bounds, and how text becomes its value."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Kind(enum.Enum):
    """Type of an option's value, which decides how text is read."""

    TEXT = "string"
    WORD = "word"
    COUNT = "int"
    BYTES = "bytes"
    DURATION = "duration"
    MODE = "mode"
    SWITCH = "bool"
    TEXTS = "strings"
    SHARES = "floats"
    SETTINGS = "settings"

    @property
    def repeats(self) -> bool:
        """Whether the flag may be given several times; its value is then a tuple."""
        return self in (Kind.TEXTS, Kind.SHARES, Kind.SETTINGS)


class OptionError(ValueError):
    """The value of an option is of the wrong type or out of its bounds. A ValueError."""


@dataclass(frozen=True)
class Option:
    """One field of `Options`, with everything the command line, the file and the manual need."""

    name: str
    """Field and keyword: `mem_queue_size`."""
    flag: str
    """`--mem-queue-size`."""
    key: str
    """The key in a TOML file: the field's name unless nsqd has another (`id` for node_id)."""
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
    """nsqd's default if it differs, for `shmq serve --nsqd`; None: it does not."""
    reload: bool
    """Whether SIGHUP gives a running broker its new value."""
    make_default: Callable[[], Any]
    default_words: str | None
    """How the default is computed, in words; None if it is the same on every machine."""

    @property
    def default(self) -> Any:
        """The default, computed now: some depend on the host."""
        return self.make_default()

    def parse(self, text: str) -> Any:
        """The value of a text from the command line. Raises OptionError."""
        if self.kind is Kind.DURATION:
            return self.check(_parse_duration(self.flag, text))
        return self.check(self._convert(self.flag, text))

    def parse_all(self, texts: Sequence[str]) -> Any:
        """The value of the texts of a flag, one for each time it was given. Raises OptionError."""
        if not self.kind.repeats:
            return self.parse(texts[-1])
        items = [item for text in texts for item in self._convert(self.flag, text)]
        # nsqd keeps percentiles in falling order
        return self.check(sorted(items, reverse=True) if self.kind is Kind.SHARES else items)

    def from_config(self, value: Any) -> Any:
        """The value of a TOML file's value: a string is read as on the command line, and a bare
        number of a duration means milliseconds. Raises OptionError."""
        if isinstance(value, str):
            return self.parse(value)
        if self.kind is Kind.DURATION and _is_number(value):
            return self._within(_seconds(value) / 1000)
        if self.kind in (Kind.TEXT, Kind.WORD) and isinstance(value, int):
            # group = 990, tls_required = true
            return self.check(str(value).lower() if isinstance(value, bool) else str(value))
        return self.check(value)

    def check(self, value: Any) -> Any:
        """The value as `Options` holds it; text is read as on the command line. Raises OptionError,
        which names the bounds."""
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
            value = _seconds(value)
        elif isinstance(value, bool) or not hasattr(value, "__index__"):
            raise OptionError(f"{self.name} must be a whole number, not {value!r}")
        else:
            value = value.__index__()
        return self._within(value)

    def _within(self, value: float) -> Any:
        """The value if it is within the bounds. Raises OptionError, which names them."""
        if (self.low is not None and value < self.low) or (
            self.high is not None and value > self.high
        ):
            shown = str(value) if value in (math.inf, -math.inf) else self.show(value)
            raise OptionError(
                f"{self.name} must be from {self.show(self.low)} to {self.show(self.high)}, "
                f"not {shown}"
            )
        return value

    def show_safely(self, value: Any) -> str:
        """Like `show`, for a log: without passwords in addresses, and with *** for a secret."""
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
        if self.kind is Kind.SETTINGS:
            return "; ".join(value)
        if self.kind.repeats:
            return ",".join(f"{item:g}" if isinstance(item, float) else item for item in value)
        return str(value)

    def _check_many(self, value: Any) -> tuple[Any, ...]:
        if self.kind is Kind.SETTINGS and isinstance(value, Mapping):
            return tuple(self._pattern(pattern, words) for pattern, words in value.items())
        if not isinstance(value, list | tuple):
            raise OptionError(f"{self.name} must be a list, not {value!r}")
        if self.kind in (Kind.TEXTS, Kind.SETTINGS):
            return tuple(self._check_text(item) for item in value)
        for item in value:
            if not _is_number(item) or not 0 < item <= 1:
                raise OptionError(f"{self.name} must be numbers above 0 and up to 1, not {item!r}")
        return tuple(float(item) for item in value)

    def _pattern(self, pattern: str, words: Any) -> str:
        """`PATTERN: key=value key=value` of a table of a TOML file."""
        if not isinstance(words, Mapping):
            raise OptionError(
                f"{self.name}: {pattern!r} must be a table of settings, not {words!r}"
            )
        shown = {
            key: str(value).lower() if isinstance(value, bool) or value is None else str(value)
            for key, value in words.items()
        }
        return f"{pattern}: " + " ".join(f"{key}={text}" for key, text in shown.items())

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
        if self.kind in (Kind.TEXTS, Kind.SETTINGS):
            return [text] if text else []
        if self.kind is Kind.SHARES:
            if not text:
                return []
            try:
                return sorted((float(part) for part in text.split(",")), reverse=True)
            except ValueError:
                raise OptionError(f"{what} must be numbers, not {text!r}") from None
        base = 8 if self.kind is Kind.MODE else 10
        if not re.fullmatch(rf"[+-]?[0-{base - 1}]{{1,{_MOST_DIGITS}}}", text):
            number = "an octal number such as 0660" if base == 8 else "a whole number"
            raise OptionError(f"{what} must be {number}, not {text[:_MOST_DIGITS]!r}")
        return int(text, base)


_SECRET = re.compile(r"secret|token|password")
#: Python does not read numbers of some thousand digits, and no option has many.
_MOST_DIGITS = 999

#: Go's strconv.ParseBool
_SWITCH = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True)
_SWITCH |= dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))
    )


def _seconds(value: float) -> float:
    """The value as a float; a whole number that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# ---- durations ----

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
_UNITS |= {"m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern})+)")


def parse_duration(text: str) -> float:
    """The seconds of a duration in Go's notation: `60s`, `100ms`, `1h15m`.

    Raises ValueError for any other text, also for a number without a unit unless it is 0, as nsqd
    does.
    """
    if text in ("0", "+0", "-0"):
        return 0.0
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a duration of {len(text)} characters is too long")
    match = _DURATION.fullmatch(text)
    if match is None:
        hint = " (it needs a unit: s, ms, m, h)" if re.fullmatch(r"[+-]?[0-9.]+", text) else ""
        raise ValueError(f"{text!r} is not a duration such as 60s, 100ms or 1h15m{hint}")
    ns = 0
    for number, unit in _PART.findall(match[2]):
        whole, _, fraction = number.partition(".")
        ns += int(whole or 0) * _UNITS[unit]
        ns += int(fraction or 0) * _UNITS[unit] // 10 ** len(fraction)
    try:
        return (-ns if match[1] == "-" else ns) / 1e9
    except OverflowError:
        raise ValueError(f"a duration of {len(text)} digits is too long") from None


def _parse_duration(what: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise OptionError(f"{what}: {exc}") from None


def format_duration(seconds: float) -> str:
    """The shortest notation with a single unit that is exact: `60s`, `100ms`, `15m`."""
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


# ---- declarations ----


def declare(
    group: str,
    default: Any,
    kind: Kind,
    help: str,
    *,
    bounds: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    nsqd: bool = True,
    key: str | None = None,
    env: str | None = None,
    nsqd_default: Any = None,
    reload: bool = False,
    default_words: str | None = None,
) -> Any:
    """A field of a dataclass that is an option. default: the value, or a function that returns it.
    bounds: the lowest and the highest value. The rest is as in `Option`."""
    low, high = bounds or (None, None)
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
        "make_default": default if callable(default) else lambda: default,
        "default_words": default_words,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(options: type[Any]) -> Iterator[Option]:
    """The options that the fields of a dataclass declare, in their order."""
    for item in dataclasses.fields(options):
        metadata = dict(item.metadata)
        metadata["key"] = metadata["key"] or item.name
        yield Option(name=item.name, flag=f"--{item.name.replace('_', '-')}", **metadata)
