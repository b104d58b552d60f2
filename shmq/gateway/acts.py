"""Which right each command of TCP and each route of HTTP needs.

A command or a route that is not in these tables is refused where rights are asked for, and
`tests/conventions/test_rights.py` fails until it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

#: `allows(act, topic, channel)`: whether somebody may do that. Without a channel it is asked of the
#: topic and all its channels, without a topic of the whole instance.
Allows = Callable[[str, str, str], bool]


class Scope(Enum):
    """The things that a command or a route concerns."""

    NOTHING = "nothing"
    """Anybody may: it reveals and changes nothing."""
    ITSELF = "itself"
    """The client's own connection, or the instance's name: everybody who was let in may."""
    SOME = "some"
    """Everything on which the client has the right; the answer is filtered."""
    NAMES = "names"
    """The topic, and the channel if there is one, that it names."""
    INSTANCE = "instance"
    """The instance as a whole."""


@dataclass(frozen=True)
class Need:
    """The right that is needed: one of the acts, of `shmq.users.ACTS`."""

    scope: Scope
    acts: tuple[str, ...] = ()
    of_topic: tuple[str, ...] = ()
    """The acts where no channel is named; empty: the same."""

    def held(self, allows: Allows, topic: str = "", channel: str = "") -> bool:
        """Whether a client who was let in may do this. Of `Scope.SOME` the caller filters."""
        if self.scope in (Scope.NOTHING, Scope.ITSELF):
            return True
        if self.scope is Scope.INSTANCE:
            topic = channel = ""
        acts = self.acts if channel or not self.of_topic else self.of_topic
        return any(allows(act, topic, channel) for act in acts)


_NOTHING: Final = Need(Scope.NOTHING)
_ITSELF: Final = Need(Scope.ITSELF)
_PUBLISH: Final = Need(Scope.NAMES, ("publish",))
_LEASE: Final = Need(Scope.NAMES, ("lease",))
_STAGE: Final = Need(Scope.NAMES, ("stage",))
_ADMINISTER: Final = Need(Scope.NAMES, ("administer",))
_READ: Final = Need(Scope.SOME, ("statistics",))
_READ_ALL: Final = Need(Scope.INSTANCE, ("statistics",))
_OPERATE: Final = Need(Scope.INSTANCE, ("administer",))
#: As nsqd, which makes what a command names: who may use a topic or channel may make it.
_MAKE: Final = Need(
    Scope.NAMES, ("subscribe", "lease", "administer"), ("publish", "stage", "administer")
)

#: The commands of TCP. Those of a subscription need no more than SUB did.
COMMANDS: Final[dict[bytes, Need]] = {
    b"IDENTIFY": _NOTHING,
    b"AUTH": _NOTHING,
    b"NOP": _NOTHING,
    b"PUB": _PUBLISH,
    b"MPUB": _PUBLISH,
    b"DPUB": _PUBLISH,
    b"SUB": Need(Scope.NAMES, ("subscribe",)),
    b"RDY": _ITSELF,
    b"FIN": _ITSELF,
    b"REQ": _ITSELF,
    b"TOUCH": _ITSELF,
    b"CLS": _ITSELF,
    # without names it says of the instance what each client needs to know: `Session.authorised`
    b"LINFO": Need(Scope.NAMES, ("lease", "subscribe", "statistics")),
    b"LMAKE": _MAKE,
    b"LHOLD": _LEASE,
    b"LKEEP": _LEASE,
    b"LCLOSE": _LEASE,
    b"LLIST": _LEASE,
    b"LLOOK": _LEASE,
    b"LFIN": _LEASE,
    b"LRET": _LEASE,
    b"LWAIT": _LEASE,
    b"LEASE": _LEASE,
    b"LREAD": _LEASE,
    b"STAGE": _STAGE,
    b"COMMIT": _STAGE,
    b"ABANDON": _STAGE,
}

#: Path -> method -> need, of HTTP. A path that ends in `*` stands for all that begin so.
ROUTES: Final[dict[str, dict[str, Need]]] = {
    "/ping": {"GET": _NOTHING},
    "/info": {"GET": _READ},
    "/stats": {"GET": _READ},
    "/metrics": {"GET": _READ},
    "/pub": {"POST": _PUBLISH},
    "/mpub": {"POST": _PUBLISH},
    "/topic/create": {"POST": _MAKE},
    "/topic/delete": {"POST": _ADMINISTER},
    "/topic/empty": {"POST": _ADMINISTER},
    "/topic/pause": {"POST": _ADMINISTER},
    "/topic/unpause": {"POST": _ADMINISTER},
    "/channel/create": {"POST": _MAKE},
    "/channel/delete": {"POST": _ADMINISTER},
    "/channel/empty": {"POST": _ADMINISTER},
    "/channel/pause": {"POST": _ADMINISTER},
    "/channel/unpause": {"POST": _ADMINISTER},
    "/config/*": {"GET": _READ_ALL, "PUT": _OPERATE},
    "/debug/*": {"GET": _OPERATE, "POST": _OPERATE, "PUT": _OPERATE},
    "/page": {"GET": _READ},
    "/page/*": {"GET": _READ},
}


def need_of(method: str, path: str) -> Need | None:
    """The need of a request; None: it is not in the table."""
    methods = ROUTES.get(path)
    if methods is None:
        begins = (each for each in ROUTES if each.endswith("*") and path.startswith(each[:-1]))
        methods = ROUTES.get(next(begins, ""), {})
    return methods.get(method)
