"""The access file in one gateway process: the users of now, and what each of them uses.

Used in the event loop's thread, but for `login`.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shmq.gateway.acts import Scope, need_of
from shmq.gateway.host import Grant
from shmq.gateway.shares import TooManyTopics
from shmq.gateway.tokens import TOKEN_VARIABLE
from shmq.option_types import OptionError
from shmq.options import Options
from shmq.users import Known, Users

#: Acts of the TCP protocol: who may do one of them without a proof need not send AUTH.
_OF_TCP: Final = ("publish", "subscribe", "lease", "stage")

_log = logging.getLogger(__name__)


@dataclass
class Used:
    """The things that one user uses in this process."""

    connections: int = 0
    balance: float = 0.0
    """Messages that may be published now; below 0 they were published in advance."""
    counted_at: float = field(default=-math.inf)

    def wait(self, rate: int, now: float) -> float:
        """Seconds until a message may be published, at `rate` messages a second."""
        earned = max(now - self.counted_at, 0.0) * rate
        self.balance, self.counted_at = min(self.balance + earned, float(rate)), now
        return 0.0 if self.balance > 0 else max(-self.balance / rate, 1 / rate)


def check(options: Options, environ: Mapping[str, str] = os.environ) -> None:
    """Check the access file at the start and before a reload. Raises OptionError, OSError."""
    path = options.access_file
    if not path:
        return
    if options.http_token_file or TOKEN_VARIABLE in environ:
        other = "--http-token-file" if options.http_token_file else TOKEN_VARIABLE
        raise OptionError(
            f"--access-file and {other} both say who may use HTTP: give one of them. A token that "
            "may do everything is in the access file: [users.admin] token = '...', "
            "allow = [{ do = ['all'] }]"
        )
    users = Users.read(path)
    if users.has_certificates and not options.tls_client_auth_policy:
        _log.warning(
            "--access-file=%s names certificates, but clients are not asked for any: give "
            "--tls-client-auth-policy=require-verify",
            path,
        )


class Rights:
    """The rules of the access file, in this process."""

    def __init__(self, options: Options) -> None:
        """Raises OptionError, OSError."""
        path = options.access_file
        self.users: Users | None = Users.read(path) if path else None
        """The users of the access file; None: there is no such file."""
        self._used: dict[str, Used] = {}
        self._made: dict[str, set[str]] = {}  # by user: the topics that he made
        self._lock = threading.Lock()
        self._now: Callable[[], float] = time.monotonic

    def changed(self, options: Options) -> None:
        """Read the file again. If it is broken, the old rules stay."""
        path = options.access_file
        try:
            self.users = Users.read(path) if path else None
        except (OptionError, OSError) as exc:
            _log.error("the access rules stay as they were: %s", exc)

    # ---- who ----

    def greet(self, uid: int | None, subject: Any) -> Grant | None:
        """The rights of a client who has sent no secret. uid: of its process, None: unknown.
        subject: of its certificate, as `ssl` has it; empty: it has none."""
        users = self.users
        if users is None:
            return None
        return _grant(users.by_uid(uid) or users.by_certificate(subject) or users.anonymous())

    def login(self, secret: bytes) -> Grant | None:
        """The rights of who brings a secret. It may take long."""
        return None if self.users is None else _grant(self.users.by_secret(secret))

    def at_once(self, secret: bytes) -> Grant | None:
        """As `login`, as far as that needs no computation."""
        return None if self.users is None else _grant(self.users.at_once(secret))

    def again(self, grant: Grant) -> Grant | None:
        """As `host.Host.again`."""
        if self.users is None or grant.known is None:
            return None
        return _grant(self.users.again(grant.known))

    @property
    def needs_auth(self) -> bool:
        """Whether clients of TCP must show who they are."""
        nobody = _grant(self.users.anonymous()) if self.users is not None else None
        if nobody is None or nobody.known is None:
            return True
        return not any(map(nobody.known.user.may_some, _OF_TCP))

    # ---- what they use ----

    def enter(self, grant: Grant) -> str:
        """As `host.Host.enter`."""
        if grant.known is None:
            return ""
        name, most = grant.known.user.name, grant.quota.connections
        used = self._used.setdefault(name, Used())
        if most is not None and used.connections >= most:
            return f"connections of {name} exceed limit of {most}"
        used.connections += 1
        return ""

    def leave(self, grant: Grant) -> None:
        """As `host.Host.leave`."""
        if grant.known is None:
            return
        used = self._used.get(grant.known.user.name)
        if used is not None and used.connections:
            used.connections -= 1

    def pause(self, grant: Grant) -> float:
        """As `host.Host.pause`."""
        rate = grant.quota.messages_per_second
        if rate is None or grant.known is None:
            return 0.0
        return self._used.setdefault(grant.known.user.name, Used()).wait(rate, self._now())

    def spend(self, grant: Grant, messages: int) -> None:
        """As `host.Host.spend`."""
        if grant.quota.messages_per_second is not None and grant.known is not None:
            self._used.setdefault(grant.known.user.name, Used()).balance -= messages

    def make_topic(self, name: str, topic: str, is_there: Callable[[str], bool]) -> int | None:
        """Count a topic that the user of this name makes, from any thread. is_there: whether a
        topic is there still; those that are not do not count. Returns the user's quota; None: he
        has none. Raises TooManyTopics."""
        user = self.users.users.get(name) if self.users is not None else None
        if user is None or user.quota.topics is None:
            return None
        most = user.quota.topics
        with self._lock:
            made = self._made.setdefault(name, set())
            if len(made) >= most and topic not in made:
                made.intersection_update([each for each in made if is_there(each)])
            if len(made) >= most and topic not in made:
                raise TooManyTopics(f"topics that {name} made exceed limit of {most}")
            made.add(topic)
        return most


def _grant(known: Known | None) -> Grant | None:
    if known is None:
        return None
    user = known.user
    return Grant(user.name, "", len(user.rules), math.inf, user.may, user.quota, known)


def secret_of(header: str) -> bytes:
    """The secret in a header Authorization: a token of Bearer, `NAME:PASSWORD` of Basic; empty: it
    has neither."""
    scheme, _, given = header.partition(" ")
    given = given.strip()
    if scheme.lower() == "bearer":
        return given.encode("utf-8", "surrogateescape")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given.encode("utf-8", "surrogateescape"), validate=True)
    except (binascii.Error, ValueError):
        return b""


def is_permitted(grant: Grant, method: str, path: str, params: Mapping[str, str]) -> bool:
    """Whether a user may send a request. A name that is missing is left to the handler, which
    answers 400."""
    need = need_of(method, path)
    if need is None or grant.known is None:
        return False
    if need.scope is Scope.SOME:
        return any(map(grant.known.user.may_some, need.acts))
    if need.scope is not Scope.NAMES:
        return need.held(grant.allows)
    if "topic" not in params or (path.startswith("/channel/") and "channel" not in params):
        return True
    channel = params["channel"] if path.startswith("/channel/") else ""
    return need.held(grant.allows, params["topic"], channel)
