"""The settings of a channel or topic: what happens at a limit, after a time, after failures.

A setting is known by one name everywhere: as a keyword of `Broker.configure`, as `key=value` on the
command line, as a key of the TOML file, in shmq.dat and in JSON. None, which is `none` in a text,
means that there is no limit, no expiry, no delay or no name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypedDict, get_args

from shmq.errors import BadArgument, BadName
from shmq.names import EPHEMERAL, MAX_NAME_BYTES, check_name, valid_name
from shmq.option_types import format_duration, parse_duration, to_ns

Overflow = Literal["disk", "block", "reject", "drop-oldest", "drop-newest"]
#: The words of `overflow`, by their numbers in the core.
OVERFLOWS: Final[tuple[Overflow, ...]] = get_args(Overflow)

#: Bits of `flags` in the core.
_EXPIRED_TO_DEAD: Final = 1
_OVERFLOW_TO_DEAD: Final = 2
_SEALED: Final = 4

_MOST_COUNT: Final = 2**63 - 1
_MOST_ATTEMPTS: Final = 65535
_MOST_SECONDS: Final = 1e9
_LEAST_SECONDS: Final = 0.001

#: How the core is given settings: counts, bytes, ns, and 0 or "" for none; see `_native.pyi`.
Native = tuple[int, int, int, int, int, int, int, int, str]


class SettingWords(TypedDict, total=False):
    """The keywords of `Broker.configure`; `Settings` says what each means."""

    max_messages: int | None
    max_bytes: int | str | None
    overflow: Overflow
    message_ttl: float | str | None
    max_attempts: int | None
    retry_delay: float | str | tuple[float, float] | None
    dead_letter: str | None
    expired_to_dead: bool
    overflow_to_dead: bool
    sealed: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a channel, or those that the later channels of a topic get. The defaults are
    nsqd's rules and no others."""

    max_messages: int | None = None
    """Messages that may wait in the channel, in memory and on disk, without those in flight or
    deferred. None: no limit."""
    max_bytes: int | None = None
    """Bytes of bodies that may wait. None: no limit."""
    overflow: str = "disk"
    """The effect of a publish to a full channel. disk: there is no limit, and what does not fit in
    memory goes to disk. block: the publisher waits, and nothing goes to disk. reject: the publish
    raises Full, in all channels. drop-oldest: the oldest waiting messages make room. drop-newest:
    this channel does not get the message."""
    message_ttl: float | None = None
    """Seconds after which a message is not delivered any more, from 0.001. None: no limit."""
    max_attempts: int | None = None
    """Failures after which a message is dead, from 1 to 65535. None: no limit."""
    retry_delay: tuple[float, float] | None = None
    """Seconds before a failed message is delivered again: the first delay, which doubles with each
    failure, and the longest. None: no delay."""
    dead_letter: str | None = None
    """The topic that dead messages go to. None: TOPIC.CHANNEL.dead."""
    expired_to_dead: bool = False
    """Whether expired messages go to the dead topic."""
    overflow_to_dead: bool = False
    """Whether messages that drop-oldest drops go to the dead topic."""
    sealed: bool = False
    """Of a topic: whether it belongs to pools and queues, which unpickle what is in it. Nothing
    else may publish to it, and no client on the other side of a network may read it. Of a channel
    of such a topic: if one is sealed, only sealed ones get messages. Pools and queues set it, and a
    channel that is made later begins with what its topic has."""

    def __post_init__(self) -> None:
        for name, (_, check) in _FUNCTIONS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        limit = "max_messages" if self.max_messages is not None else "max_bytes"
        if self.overflow == "disk" and getattr(self, limit) is not None:
            raise BadArgument(
                f"{limit} has no effect while overflow is disk: set overflow to "
                f"{', '.join(OVERFLOWS[1:-1])} or {OVERFLOWS[-1]} too, or {limit} to none"
            )
        if self.overflow in ("drop-oldest", "drop-newest") and (
            self.max_messages is None and self.max_bytes is None
        ):
            raise BadArgument(
                f"overflow={self.overflow} needs a limit: set max_messages or max_bytes too"
            )
        if self.overflow_to_dead and self.overflow != "drop-oldest":
            raise BadArgument(
                "overflow_to_dead has an effect only with overflow=drop-oldest, which is "
                f"{self.overflow}"
            )

    # ---- change ----

    def changed(self, words: Mapping[str, Any]) -> Self:
        """A copy with these settings changed; a text is read as on the command line. Raises
        BadArgument, also for an unknown name."""
        for name in words:
            if name not in KEYS:
                raise BadArgument(_unknown(name))
        return dataclasses.replace(
            self,
            **{
                name: _FUNCTIONS[name][0](name, value) if isinstance(value, str) else value
                for name, value in words.items()
            },
        )

    def check_names(self, topic: str, channel: str | None) -> Self:
        """Return the settings if the dead topic of this channel has a valid name. Raises
        BadName."""
        if self.dead_letter == topic:
            raise BadName(
                f"dead_letter {topic!r} is the topic itself: name another one, or set it to none"
            )
        to_dead = self.max_attempts or self.expired_to_dead or self.overflow_to_dead
        if channel is not None and self.dead_letter is None and to_dead:
            name = dead_topic(topic, channel)
            if not valid_name(name):
                raise BadName(
                    f"the dead topic {name!r} of {topic}/{channel} has more than {MAX_NAME_BYTES} "
                    "characters: name one (dead_letter=TOPIC)"
                )
        return self

    def dead_topic_of(self, topic: str, channel: str) -> str | None:
        """The topic that gets dead messages of this channel; None if its settings make none."""
        to_dead = self.max_attempts or self.expired_to_dead or self.overflow_to_dead
        return (self.dead_letter or dead_topic(topic, channel)) if to_dead else None

    # ---- other forms ----

    @classmethod
    def from_native(cls, native: Native) -> Self:
        """The settings that the core returns."""
        messages, nbytes, ttl, first, most, attempts, overflow, flags, dead = native
        return cls(
            max_messages=messages or None,
            max_bytes=nbytes or None,
            overflow=OVERFLOWS[overflow],
            message_ttl=ttl / 1e9 if ttl else None,
            max_attempts=attempts or None,
            retry_delay=(first / 1e9, most / 1e9) if first else None,
            dead_letter=dead or None,
            expired_to_dead=bool(flags & _EXPIRED_TO_DEAD),
            overflow_to_dead=bool(flags & _OVERFLOW_TO_DEAD),
            sealed=bool(flags & _SEALED),
        )

    def to_native(self) -> Native:
        """The settings as the core takes them."""
        first, most = self.retry_delay or (0.0, 0.0)
        flags = _EXPIRED_TO_DEAD * self.expired_to_dead | _OVERFLOW_TO_DEAD * self.overflow_to_dead
        flags |= _SEALED * self.sealed
        return (
            self.max_messages or 0,
            self.max_bytes or 0,
            to_ns(self.message_ttl or 0),
            to_ns(first),
            to_ns(most),
            self.max_attempts or 0,
            OVERFLOWS.index(self.overflow),
            flags,
            self.dead_letter or "",
        )

    def texts(self) -> dict[str, str]:
        """The values as they are written on the command line, by name."""
        return {name: _show(name, getattr(self, name)) for name in KEYS}

    def differing(self, base: Settings | None = None) -> dict[str, str]:
        """The texts of the values that differ from those of `base`; None: from the defaults."""
        other = base or NONE
        return {
            name: text
            for name, text in self.texts().items()
            if getattr(self, name) != getattr(other, name)
        }

    def to_json(self) -> dict[str, Any]:
        """The values by name: counts, bytes, seconds, words, null for none."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.differing().items())


class Patterns:
    """Settings by pattern of names, as the options `topics` and `channels` have them."""

    def __init__(self, texts: Iterable[str]) -> None:
        """texts: each `PATTERN: key=value key=value`. Raises BadArgument."""
        self._items: list[tuple[re.Pattern[str], dict[str, str]]] = []
        for text in texts:
            pattern, colon, words = text.partition(":")
            if not colon or not pattern.strip():
                raise BadArgument(
                    f"{text!r} names no settings for a pattern: write 'PATTERN: KEY=VALUE ...', "
                    "such as 'jobs.*: max_messages=1000 overflow=block'"
                )
            parsed = parse_words(words.split())
            Settings().changed(parsed)
            self._items.append((re.compile(fnmatch.translate(pattern.strip())), parsed))

    def apply(self, base: Settings, *names: str) -> Settings:
        """`base`, changed by each pattern that matches one of the names, in their order. Raises
        BadArgument if the settings that matching patterns give do not fit together."""
        words: dict[str, str] = {}
        for pattern, given in self._items:
            if any(pattern.match(name) for name in names):
                words |= given
        return base.changed(words) if words else base


def dead_topic(topic: str, channel: str) -> str:
    """The topic that gets a channel's dead messages if its settings name none."""
    return f"{topic.removesuffix(EPHEMERAL)}.{channel.removesuffix(EPHEMERAL)}.dead"


def parse_words(texts: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as {key: value}. Raises BadArgument for one without `=`, for an unknown key
    and for one that is given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadArgument(f"{text!r} is no setting: write KEY=VALUE, such as max_messages=1000")
        if name not in KEYS:
            raise BadArgument(_unknown(name))
        if name in found:
            raise BadArgument(f"{name} is given twice")
        found[name] = value
    return found


def unknown_keyword(name: str) -> str:
    """A sentence on a setting that does not exist, which names similar ones."""
    return _unknown(name)


def _unknown(name: str) -> str:
    import difflib  # slow to import, and needed for a mistake only

    close = difflib.get_close_matches(name.replace("-", "_"), KEYS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(KEYS)}"
    return f"there is no setting {name!r}: {hint}"


# ---- checks of values ----


def _count(name: str, value: Any, most: int = _MOST_COUNT) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BadArgument(f"{name} must be a whole number or None, not {value!r}")
    value = value.__index__()
    if not 1 <= value <= most:
        raise BadArgument(f"{name} must be from 1 to {most}, or None for no limit, not {value}")
    return int(value)


def _attempts(name: str, value: Any) -> int | None:
    if value == 0 and isinstance(value, int) and not isinstance(value, bool):
        return None  # as nsqd's clients mean it
    return _count(name, value, _MOST_ATTEMPTS)


def _overflow(name: str, value: Any) -> str:
    if value not in OVERFLOWS:
        raise BadArgument(f"{name} must be one of {', '.join(OVERFLOWS)}, not {value!r}")
    return str(value)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadArgument(f"{name} must be seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:  # not so for a NaN
        raise BadArgument(
            f"{name} must be from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} seconds, or None for "
            f"none, not {seconds:g}"
        )
    return math.floor(seconds * 1e9 + 0.5) / 1e9  # what the core keeps


def _ttl(name: str, value: Any) -> float | None:
    return None if value is None else _seconds(name, value)


def _delay(name: str, value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2:
        raise BadArgument(f"{name} must be seconds, (first, longest) or None, not {value!r}")
    first, most = (_seconds(name, item) for item in pair)
    if most < first:
        raise BadArgument(
            f"{name}: the first delay ({first:g} s) must not be longer than the longest "
            f"({most:g} s)"
        )
    return first, most


def _name(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadArgument(f"{name} must be the name of a topic or None, not {value!r}")
    return check_name(value, name)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadArgument(f"{name} must be true or false, not {value!r}")
    return value


# ---- texts ----

# Python does not read numbers of some thousand digits, and a limit has few.
_SIZE = re.compile(r"([0-9]{1,99})\s*([kKMGT]?)(i?)[bB]?")


def _parse_size(name: str, text: str) -> int | None:
    if text == "none":
        return None
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise BadArgument(f"{name}: {text!r} is no size such as 65536, 64KiB, 10MB or none")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    size: int = int(match[1]) * (1024 if match[3] else 1000) ** power
    return size


def _parse_count(name: str, text: str) -> int | None:
    if text == "none":
        return None
    if not re.fullmatch("[+-]?[0-9]{1,99}", text):
        raise BadArgument(f"{name} must be a whole number or none, not {text!r}")
    return int(text)


def _parse_seconds(name: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise BadArgument(f"{name}: {exc}, nor is it none") from None


def _parse_delay(name: str, text: str) -> tuple[float | None, ...] | None:
    if text == "none":
        return None
    first, _, most = text.partition("..")
    return _parse_seconds(name, first), _parse_seconds(name, most or first)


def _parse_switch(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise BadArgument(f"{name} must be true or false, not {text!r}")
    return text == "true"


def _parse_name(name: str, text: str) -> str | None:
    return None if text in ("none", "") else text


def _parse_word(name: str, text: str) -> str:
    return text


#: Setting -> the function that reads its text, and the one that checks its value; in their order.
_FUNCTIONS: Final[dict[str, tuple[Callable[[str, str], Any], Callable[[str, Any], Any]]]] = {
    "max_messages": (_parse_count, _count),
    "max_bytes": (_parse_size, _count),
    "overflow": (_parse_word, _overflow),
    "message_ttl": (_parse_seconds, _ttl),
    "max_attempts": (_parse_count, _attempts),
    "retry_delay": (_parse_delay, _delay),
    "dead_letter": (_parse_name, _name),
    "expired_to_dead": (_parse_switch, _switch),
    "overflow_to_dead": (_parse_switch, _switch),
    "sealed": (_parse_switch, _switch),
}

#: The names of all settings, in their order.
KEYS: Final = tuple(_FUNCTIONS)

#: Name of a setting -> what may be written for it, and what it means: for people who change one.
MEANINGS: Final[dict[str, tuple[str, str]]] = {
    "max_messages": ("messages, or none", "at most so many wait, without those in flight"),
    "max_bytes": ("bytes, as 64MiB, or none", "at most so many bytes of bodies wait"),
    "overflow": (", ".join(OVERFLOWS), "what a publish to a full channel does"),
    "message_ttl": ("duration, as 10m, or none", "an older message is not delivered any more"),
    "max_attempts": ("failures, 1 to 65535, or none", "after so many a message is dead"),
    "retry_delay": (
        "duration, as 1s or 1s..5m, or none",
        "before a failed message is delivered again; it doubles up to the second",
    ),
    "dead_letter": ("topic, or none", "where dead messages go; none: TOPIC.CHANNEL.dead"),
    "expired_to_dead": ("true, false", "whether expired messages go to the dead topic"),
    "overflow_to_dead": ("true, false", "whether what drop-oldest drops goes to the dead topic"),
    "sealed": (
        "true, false",
        "of a topic: whether only pools and queues may use it",
    ),
}


def _show(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if name == "message_ttl":
        return format_duration(value)
    if name == "retry_delay":
        first, most = map(format_duration, value)
        return first if first == most else f"{first}..{most}"
    return str(value)


#: The defaults: nsqd's rules and no others.
NONE: Final = Settings()
