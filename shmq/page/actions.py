"""The changes that the page may make with `--admin`. Each is a command of `shmq` as well, which the
page shows before it acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import shmq
from shmq import audit
from shmq.errors import BadArgument

if TYPE_CHECKING:  # a page that only shows needs none
    from shmq.broker import Broker


def _topic(verb: str) -> Callable[[Broker, dict[str, Any]], str]:
    def act(broker: Broker, wish: dict[str, Any]) -> str:
        found = getattr(broker, f"{verb}_topic")(_text(wish, "topic"))
        return _done(verb, f"topic {wish['topic']}", found)

    return act


def _channel(verb: str) -> Callable[[Broker, dict[str, Any]], str]:
    def act(broker: Broker, wish: dict[str, Any]) -> str:
        topic, channel = _text(wish, "topic"), _text(wish, "channel")
        found = getattr(broker, f"{verb}_channel")(topic, channel)
        return _done(verb, f"channel {topic}/{channel}", found)

    return act


def _configure(broker: Broker, wish: dict[str, Any]) -> str:
    topic, channel = _text(wish, "topic"), wish.get("channel")
    settings = wish.get("settings")
    if not isinstance(settings, dict) or not settings:
        raise ValueError("settings is an object with at least one setting")
    broker.settings(topic, channel)  # a name that is mistyped is not created
    broker.configure(topic, channel, **settings)
    where = f"topic {topic}" if channel is None else f"channel {topic}/{channel}"
    return f"{', '.join(settings)} of {where} set"


def _message(verb: str) -> Callable[[Broker, dict[str, Any]], str]:
    def act(broker: Broker, wish: dict[str, Any]) -> str:
        topic, channel, id = (_text(wish, name) for name in ("topic", "channel", "id"))
        getattr(broker, f"{verb}_message")(topic, channel, id, pid=wish.get("pid"))
        return f"message {id} of {topic}/{channel} {_PAST[verb]}"

    return act


def _letters(verb: str) -> Callable[[Broker, dict[str, Any]], str]:
    def act(broker: Broker, wish: dict[str, Any]) -> str:
        topic, channel = _text(wish, "topic"), _text(wish, "channel")
        letters = broker.dead(topic, channel, wish.get("via"))
        exact = wish.get("exact") is True
        count = getattr(letters, verb)(None, wish.get("reason"), wish.get("error"), exact)
        return f"{count} dead letters of {topic}/{channel} {_PAST[verb]}"

    return act


_PAST: Final = {
    "pause": "paused",
    "unpause": "unpaused",
    "empty": "emptied",
    "delete": "deleted",
    "redrive": "sent back",
    "drop": "dropped",
    "finish": "finished",
    "requeue": "requeued",
}

#: Further fields of a line of the audit log, if the wish has them.
_NOTED: Final = ("id", "pid", "reason", "error", "via", "exact", "settings")

#: Name of an action -> what it does. Each returns a sentence.
_ACTIONS: Final[dict[str, Callable[[Broker, dict[str, Any]], str]]] = {
    **{f"{verb}_topic": _topic(verb) for verb in ("pause", "unpause", "empty", "delete")},
    **{f"{verb}_channel": _channel(verb) for verb in ("pause", "unpause", "empty", "delete")},
    **{f"{verb}_message": _message(verb) for verb in ("finish", "requeue")},
    "configure": _configure,
    "redrive": _letters("redrive"),
    "drop": _letters("drop"),
}


#: The fields of a wish.
FIELDS: Final[dict[str, type | tuple[type, ...]]] = {
    "action": str,
    "topic": str,
    "channel": str,
    "id": str,
    "pid": int,
    "reason": str,
    "error": str,
    "via": str,
    "exact": bool,
    "settings": dict,
}


def act(instance: str, owner: str | int | None, wish: dict[str, Any], by: str) -> str:
    """Do what a browser wishes, note it in the audit log, and return a sentence about it.

    wish: `action`, `topic`, mostly `channel`, and what that action takes, of the types in FIELDS.
    by: the client's name in the log. Raises ValueError for a wish that makes no sense, and what
    the broker's methods raise.
    """
    if wish.get("action") not in _ACTIONS:
        raise ValueError(f"action is one of {', '.join(_ACTIONS)}")
    topic, channel = str(wish.get("topic", "")), str(wish.get("channel") or "")
    more = {name: _noted(wish[name]) for name in _NOTED if wish.get(name) is not None}
    with audit.acting(by), audit.noted(f"page_{wish['action']}", topic, channel, **more):
        try:
            with shmq.attach(instance, owner=owner) as broker:
                return _ACTIONS[wish["action"]](broker, wish)
        except (TypeError, OverflowError, AttributeError) as exc:
            raise BadArgument(f"{wish['action']}: {exc}") from exc


def _text(wish: dict[str, Any], name: str) -> str:
    found = wish.get(name)
    if not isinstance(found, str):
        raise ValueError(f"{name} is a name, not {found!r}")
    return found


def _noted(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{text}" for name, text in value.items())
    return str(value)


def _done(verb: str, what: str, count: Any) -> str:
    more = f", {count} messages dropped" if isinstance(count, int) else ""
    return f"{what} {_PAST[verb]}{more}"
