"""The values of a broker's options, checked. option_fields.py declares the options.

All other modules read `Options`. The command line, the configuration file and the keywords of
`shmq.Broker` are three ways to fill it.

Durations are seconds (float) in an `Options`. As in nsqd, they need a unit on the command line
(`60s`), and a bare number in a TOML file means milliseconds.
"""

from __future__ import annotations

import dataclasses
import grp
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from shmq import _native, settings
from shmq.errors import BadArgument, BadName
from shmq.host_defaults import instance_of
from shmq.names import check_instance
from shmq.option_fields import MAX_SLOTS, TRANSIT, OptionFields
from shmq.option_types import Kind, Option, OptionError, declared, to_ns
from shmq.shm import LEAST_HISTORY, NO_GROUP

_CONSTANTS: Final = _native.CONSTANTS

#: Bytes that the allocator adds to a body, and the unit it rounds up to.
ARENA_HEAD: Final = _CONSTANTS["ARENA_HEAD"]
ARENA_UNIT: Final = _CONSTANTS["ARENA_UNIT"]

#: Share of `arena_size` that one message may take; the rest is for messages in flight.
ARENA_SHARE: Final = 0.75

#: Keywords of other queues -> the end of the error's sentence, which names shmq's option.
_OTHERS_NAMES = dict.fromkeys(
    ("maxsize", "max_size", "maxlen", "max_len", "limit"),
    ": mem_queue_size is how many messages of a topic or channel wait in memory; more wait on disk",
)


class Options(OptionFields):
    """The values of a broker's options, checked at construction. Raises OptionError, which names
    the bounds."""

    # No dataclass of its own: `OptionFields` has the fields and calls `__post_init__`, and to
    # generate the same methods again takes longer than to import this module.

    def __post_init__(self) -> None:
        for option in OPTIONS.values():
            object.__setattr__(self, option.name, option.check(getattr(self, option.name)))
        check_instance(self.instance)
        for name in ("topics", "channels"):
            try:
                settings.Patterns(getattr(self, name))
            except (BadArgument, BadName) as exc:
                raise OptionError(f"{name}: {exc}") from None
        slots = max(self.mem_queue_size, TRANSIT) + self.in_flight_slots
        if slots > MAX_SLOTS:
            raise OptionError(
                f"mem_queue_size and in_flight_slots together may be at most {MAX_SLOTS}, "
                f"not {slots}"
            )
        if 0 < self.history_bytes < LEAST_HISTORY:
            raise OptionError(f"history_bytes must be 0 or at least {LEAST_HISTORY}")
        room = int(self.arena_size * ARENA_SHARE) // ARENA_UNIT * ARENA_UNIT - ARENA_HEAD
        if self.max_msg_size > room:
            raise OptionError(
                f"max_msg_size {self.max_msg_size} does not fit arena_size {self.arena_size}: one "
                f"message may take 3/4 of it, here {room} bytes. Lower max_msg_size or raise "
                f"arena_size to {arena_size_for(self.max_msg_size)}"
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Options:
        """The options from keywords of `shmq.Broker`; None means the default.

        Raises TypeError for an unknown keyword, naming similar ones, and OptionError.
        """
        unknown = [name for name in keywords if name not in OPTIONS]
        if unknown:
            close = _similar(unknown[0], OPTIONS)
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
        """The options from a command line and a configuration file; a flag comes first, then the
        file, then the default.

        flags: texts by field name; None if the flag is not given, a sequence if it repeats.
        config: a TOML document; `unknown_keys` finds keys that are no option. nsqd: use nsqd's
        defaults, and an instance named after the data path if none is given. Raises OptionError.
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
        """These values and the defaults of the others. The default arena grows with max_msg_size,
        so that nsqd's flags suffice: it is only address space until bodies use it."""
        if "max_msg_size" in values and "arena_size" not in values:
            largest = OPTIONS["max_msg_size"].check(values["max_msg_size"])
            default = OPTIONS["arena_size"].default
            values = {**values, "arena_size": max(default, arena_size_for(largest))}
        return cls(**values)

    def replace(self, **changes: Any) -> Options:
        """A copy with some values changed. Raises OptionError."""
        return dataclasses.replace(self, **changes)

    def differing(self, nsqd: bool = False) -> list[str]:
        """`name=value` for each value that is not the default (or nsqd's default), fit for a
        log."""
        default = Options.load({}, nsqd=nsqd)
        return [
            f"{option.name}={option.show_safely(value)}"
            for option in OPTIONS.values()
            for value in [getattr(self, option.name)]
            if value != getattr(default, option.name)
        ]

    def changes(self, new: Options) -> tuple[dict[str, Any], list[str]]:
        """The options whose value differs in `new`: ({name: new value} of those that a running
        broker can change, the names of those that need a restart)."""
        differ = {
            option.name: getattr(new, option.name)
            for option in OPTIONS.values()
            if getattr(new, option.name) != getattr(self, option.name)
        }
        taken = {name: value for name, value in differ.items() if OPTIONS[name].reload}
        return taken, [name for name in differ if name not in taken]

    def to_argv(self) -> list[str]:
        """The flags of `python -m shmq serve` for the instance and every value that is not the
        default."""
        default = Options()
        argv = []
        for option in OPTIONS.values():
            value = getattr(self, option.name)
            if option.kind in (Kind.TEXTS, Kind.SETTINGS):
                argv += [f"{option.flag}={item}" for item in value]
            elif option.name == "instance" or value != getattr(default, option.name):
                argv.append(f"{option.flag}={option.show(value)}")
        return argv

    def to_json(self) -> dict[str, Any]:
        """All values by TOML key, durations in ns, as in nsqd's /config."""
        return {
            option.key: to_ns(value) if option.kind is Kind.DURATION else value
            for option in OPTIONS.values()
            for value in [getattr(self, option.name)]
        }

    def limits(self) -> dict[str, int]:
        """The keywords of the extension's create_directory and supervise, times in ns."""
        return {
            "msg_timeout": to_ns(self.msg_timeout),
            "max_msg_timeout": to_ns(self.max_msg_timeout),
            "max_req_timeout": to_ns(self.max_req_timeout),
            "max_msg_size": self.max_msg_size,
            "node_id": self.node_id,
            **self.queue_limits(),
        }

    def queue_limits(self) -> dict[str, int]:
        """The keywords of the extension's queue_bytes."""
        return {
            "arena_size": self.arena_size,
            "mem_queue_size": self.mem_queue_size,
            "in_flight_slots": self.in_flight_slots,
        }

    def permissions(self) -> tuple[int, int]:
        """Mode and gid (or NO_GROUP) of every shared memory object. Raises OptionError if there is
        no such group."""
        return _permissions(self.mode, self.group)

    def socket_permissions(self) -> tuple[int, int]:
        """Mode and gid (or NO_GROUP) of the gateway's Unix sockets. Raises OptionError if there is
        no such group."""
        return _permissions(self.socket_mode, self.socket_group)


#: The largest gid, and how many digits of a text are looked at: more than any gid has.
_LAST_GID: Final = (1 << 32) - 2
_GID_DIGITS: Final = 100


def _permissions(mode: int, group: str) -> tuple[int, int]:
    if not group:
        return mode or 0o600, NO_GROUP
    try:
        gid = int(group[:_GID_DIGITS]) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):  # a zero byte
        raise OptionError(f"group {group!r} is not known on this host") from None
    if gid > _LAST_GID:
        raise OptionError(f"group {group[:_GID_DIGITS]!r} is no gid: they end at {_LAST_GID}")
    return mode or 0o660, gid


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each key of a TOML document that is no option, naming similar options."""
    keys = {option.key for option in OPTIONS.values()}
    return [f"there is no option {key!r}{_hint(key, keys)}" for key in config if key not in keys]


def _hint(name: str, known: Iterable[str]) -> str:
    """A question that names the options similar to an unknown name; empty if there are none."""
    option = OPTIONS.get(name.replace("-", "_"))
    close = [option.key] if option is not None else _similar(name, known)
    return f": did you mean {' or '.join(close)}?" if close else ""


def _similar(name: str, known: Iterable[str]) -> list[str]:
    import difflib  # slow to import, and needed for a mistake only

    return difflib.get_close_matches(name, known, n=3)


def arena_size_for(max_msg_size: int) -> int:
    """The smallest arena_size (of whole MiB) in which a message of this size fits."""
    need = math.ceil((max_msg_size + ARENA_HEAD + ARENA_UNIT) / ARENA_SHARE)
    return -(-need // (1 << 20)) << 20


#: Every option by field name, in the order of the manual.
OPTIONS: dict[str, Option] = {option.name: option for option in declared(Options)}
