"""Users of the gateway: who they are, by which proof, and what each may do. docs/access.md has the
form of the file that says so (`--access-file`).

Nothing here knows a socket, HTTP or aiohttp: `Users.parse` reads a file, `Users.by_token` and its
neighbours find the user who brings a proof, and `User.may` answers every question about a right.
An act that no rule grants is denied.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import hashlib
import hmac
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shmq.names import EPHEMERAL
from shmq.option_types import OptionError
from shmq.ownership import read_secret, uid_of
from shmq.printing import LONGEST, printable

#: Acts that a rule may grant, and their meanings. The file, the commands and the manual use these
#: words.
ACTS: Final = {
    "publish": "PUB, MPUB and DPUB, over HTTP /pub and /mpub; a missing topic is created",
    "subscribe": "SUB, and what belongs to a subscription; a missing topic or channel is created",
    "lease": "the lease commands on a channel, which take messages and read them",
    "stage": "STAGE, COMMIT and ABANDON on a topic, which publish rows exactly once",
    "administer": "create, delete, empty, pause and unpause; without `topics` also configure and "
    "debug",
    "statistics": "the counts in /stats, /metrics and /page/; without `topics` also /config",
    "bodies": "on /page/ the bodies and properties of messages, errors and command lines",
}
#: In a rule's `do`: every act.
ALL: Final = "all"
#: Acts that concern a topic only: a rule with `channels` cannot grant them.
_WITHOUT_CHANNEL: Final = frozenset({"publish", "stage"})
#: The user who brings no proof.
ANONYMOUS: Final = "anonymous"

#: The fewest characters of a token, here and in a file of `--http-token-file`.
SHORTEST_TOKEN: Final = 16

_LONGEST_NAME: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}\Z")
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_GLOB: Final = re.compile(r"[][.a-zA-Z0-9_*?!#-]{1,200}\Z")
_SIZE: Final = re.compile(r"([0-9]{1,18}) ?(|K|M|G|T)(iB)?\Z")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_NUMBER: Final = 1 << 62

_USER_KEYS: Final = ("token", "token_sha256", "password", "certificate", "uid", "allow", "quota")
_PROOF_KEYS: Final = _USER_KEYS[:5]
_RULE_KEYS: Final = ("do", "topics", "channels")

#: Decisions that a user's rules remember: each command of a client asks the same again.
_REMEMBERED: Final = 1024
#: Passwords that were right, and are not computed again.
_VERIFIED: Final = 1024

#: The cost of a password's hash (log2 of N, r, p), and what a file may ask for at most: 64 MiB.
_COST: Final = (14, 8, 1)
_MOST_COST: Final = (17, 32, 8)
_MOST_SCRYPT_BYTES: Final = 64 << 20
_SALT_BYTES: Final = 16
_HASH_BYTES: Final = 32

#: Of this process. With it a table may be keyed by secrets: how long a search takes says nothing.
_KEY: Final = secrets.token_bytes(32)


class BadAccessFile(OptionError):
    """The access file says something that it cannot mean. The text names the place in the file."""


@dataclass(frozen=True)
class Quota:
    """The limits of one user, in one gateway process; None: as much as the options allow."""

    connections: int | None = None
    """Connections of TCP and HTTP at a time."""
    messages_per_second: int | None = None
    """Published messages; clients of TCP are read more slowly, of HTTP they get a 429."""
    staged_bytes: int | None = None
    """Bytes of rows that are staged and not committed."""
    leases: int | None = None
    """Open leases."""
    topics: int | None = None
    """Topics that the user made."""


_QUOTA_KEYS: Final = tuple(Quota.__dataclass_fields__)


@dataclass(frozen=True)
class Proof:
    """A proof of who somebody is, in a form that reveals no secret."""

    kind: str
    """`token`, `password`, `certificate`, `uid`, or `none`."""
    value: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Rule:
    """Acts that are granted on some topics and channels."""

    where: str
    """The place in the file: `users.scanner.allow[0]`."""
    acts: frozenset[str]
    topics: tuple[str, ...] | None
    """Patterns; None: every topic, and the instance itself."""
    channels: tuple[str, ...] | None
    """Patterns; None: every channel, and the topic itself."""

    def covers(self, act: str, topic: str, channel: str) -> bool:
        """Whether the rule grants an act. Without a topic it is one on the whole instance, without
        a channel one on the topic and all its channels."""
        if act not in self.acts or not _covers(self.topics, topic):
            return False
        return act in _WITHOUT_CHANNEL or _covers(self.channels, channel)

    def text(self) -> str:
        """The rule as the file has it."""
        words = [f"do = {_quoted(sorted(self.acts, key=list(ACTS).index))}"]
        if self.topics is not None:
            words.append(f"topics = {_quoted(self.topics)}")
        if self.channels is not None:
            words.append(f"channels = {_quoted(self.channels)}")
        return f"{{ {', '.join(words)} }}"


class User:
    """One user of the file."""

    def __init__(self, name: str, rules: tuple[Rule, ...], quota: Quota) -> None:
        self.name = name
        self.is_anonymous = name == ANONYMOUS
        """Whether nothing has shown who it is."""
        self.rules = rules
        self.quota = quota
        #: `may(act, topic="", channel="")`: whether the user may do that. Without a topic it is
        #: asked of the whole instance, without a channel of the topic and all its channels.
        self.may: Callable[..., bool] = functools.lru_cache(_REMEMBERED)(self._may)
        #: `may_some(act, topic="")`: whether the user may do that on some topic, or on some
        #: channel of this topic.
        self.may_some: Callable[..., bool] = functools.lru_cache(_REMEMBERED)(self._may_some)

    def _may(self, act: str, topic: str = "", channel: str = "") -> bool:
        return any(rule.covers(act, topic, channel) for rule in self.rules)

    def _may_some(self, act: str, topic: str = "") -> bool:
        return any(
            act in rule.acts and (not topic or _covers(rule.topics, topic)) for rule in self.rules
        )

    def why(self, act: str, topic: str = "", channel: str = "") -> tuple[bool, str]:
        """Whether the user may do that, and a sentence with the reason."""
        for rule in self.rules:
            if rule.covers(act, topic, channel):
                return True, f"{rule.where} grants it: {rule.text()}"
        granting = [rule for rule in self.rules if act in rule.acts]
        if not granting:
            return False, f"no rule of {self.name} grants {act} anywhere"
        near = [rule for rule in granting if _covers(rule.topics, topic)]
        if not near and not topic:
            return False, (
                f"no rule grants {act} on the whole instance: each names topics, such as "
                f"{granting[0].where} {granting[0].text()}"
            )
        if not near:
            return False, f"no rule of {self.name} that grants {act} matches topic {topic}"
        place = f"channel {channel}" if channel else "the topic with all its channels"
        return False, f"{near[0].where} matches topic {topic}, but not {place}: {near[0].text()}"

    def __repr__(self) -> str:
        return f"<User {self.name}, {len(self.rules)} rules>"


@dataclass(frozen=True)
class Known:
    """A user, and the proof by which one connection is his."""

    user: User
    proof: Proof


class Users:
    """The users of one access file. Any thread may use it."""

    def __init__(self, users: Mapping[str, User], proofs: Mapping[Proof, str]) -> None:
        """proofs: each with the name of its user."""
        self.users = dict(users)
        self._proofs = dict(proofs)
        self._passwords = {
            proof.value[0]: proof for proof in self._proofs if proof.kind == "password"
        }
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    # ---- the file ----

    @classmethod
    def read(cls, path: str) -> Users:
        """Read the file. Raises BadAccessFile, which names the place, and OSError if it cannot be
        read or if others may read or write it."""
        data = read_secret(path, "--access-file")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise BadAccessFile(f"{path}: it is not UTF-8 text") from None
        try:
            return cls.parse(text)
        except BadAccessFile as exc:
            raise BadAccessFile(f"{path}: {exc}") from None

    @classmethod
    def parse(cls, text: str) -> Users:
        """Parse the text of a file. Raises BadAccessFile."""
        import tomllib  # slow to import

        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as exc:
            # a TOML error names the place and quotes none of the text
            raise BadAccessFile(f"it is no TOML: {exc}") from None
        _only(document, ("users",), "the file")
        tables = document.get("users", {})
        if not isinstance(tables, dict) or not tables:
            raise BadAccessFile("it names no user: write [users.NAME]")
        users: dict[str, User] = {}
        proofs: dict[Proof, str] = {}
        for name, table in tables.items():
            where = f"users.{name}"
            if not _NAME.match(name):
                raise BadAccessFile(
                    f"{where!r}: the name of a user has 1 to 64 of the characters "
                    "A-Z a-z 0-9 _ . @ -"
                )
            if not isinstance(table, dict):
                raise BadAccessFile(f"{where} must be a table: [users.{name}]")
            _only(table, _USER_KEYS, where)
            for proof, place in _proofs_of(name, table, where):
                other = proofs.setdefault(proof, name)
                if other != name:
                    raise BadAccessFile(f"{place}: users.{other} has the same {proof.kind}")
            users[name] = User(name, tuple(_rules_of(table, where)), _quota_of(table, where))
        return cls(users, proofs)

    def why(self, name: str, act: str, topic: str = "", channel: str = "") -> tuple[bool, str]:
        """Whether the user of this name may do that, and a sentence with the reason."""
        user = self.users.get(name)
        if user is not None:
            return user.why(act, topic, channel)
        if name == ANONYMOUS:
            return False, f"there is no [users.{ANONYMOUS}], so nobody is let in without a proof"
        return False, f"the file has no user {name}"

    # ---- proofs ----

    @property
    def has_certificates(self) -> bool:
        """Whether a user is known by a certificate."""
        return any(proof.kind == "certificate" for proof in self._proofs)

    @property
    def has_secrets(self) -> bool:
        """Whether a user is known by a token or a password."""
        return any(proof.kind in ("token", "password") for proof in self._proofs)

    def again(self, known: Known) -> Known | None:
        """The same user by the same proof, as this file has them; None if the file has not."""
        return self._holder(known.proof, known.user.name)

    def anonymous(self) -> Known | None:
        """The user who brings no proof; None: nobody is let in without one."""
        return self._holder(Proof("none"))

    def by_token(self, token: bytes) -> Known | None:
        """The user of a token; None: nobody has it."""
        return self._holder(_token(hashlib.sha256(token).digest()))

    def by_uid(self, uid: int | None) -> Known | None:
        """The user who runs the process at the other end of a Unix socket."""
        return None if uid is None else self._holder(Proof("uid", uid))

    def by_certificate(self, subject: Iterable[Iterable[tuple[str, str]]]) -> Known | None:
        """The user of a certificate that was verified. subject: as in `ssl.getpeercert`."""
        pairs = [pair for entry in subject for pair in entry]
        return self._holder(Proof("certificate", _subject_of(pairs))) if pairs else None

    def by_password(self, name: str, password: bytes) -> Known | None:
        """The user of this name, if it is his password. It takes some 50 ms of a core and 16 MiB:
        call it in one of a few threads. Nobody learns which names there are."""
        known = self.by_verified(name, password)
        if known is not None:
            return known
        proof = self._passwords.get(name)
        stored = proof.value[1] if proof is not None else _NOBODYS
        if not _verify(stored, password) or proof is None:
            return None
        with self._lock:
            self._verified[_mark(name, password, stored)] = None
            while len(self._verified) > _VERIFIED:
                self._verified.popitem(last=False)
        return self._holder(proof)

    def by_verified(self, name: str, password: bytes) -> Known | None:
        """As `by_password`, but at once: None if the password was not verified lately."""
        proof = self._passwords.get(name)
        if proof is None:
            return None
        mark = _mark(name, password, proof.value[1])
        with self._lock:
            if mark not in self._verified:
                return None
            self._verified.move_to_end(mark)
        return self._holder(proof)

    def at_once(self, secret: bytes) -> Known | None:
        """The user of a secret (a token, or `NAME:PASSWORD`), as far as that needs no
        computation."""
        known = self.by_token(secret)
        if known is not None:
            return known
        name, colon, password = secret.partition(b":")
        return self.by_verified(name.decode("latin-1"), password) if colon else None

    def by_secret(self, secret: bytes) -> Known | None:
        """The user of a secret, a token or `NAME:PASSWORD`. It may take as long as
        `by_password`."""
        known = self.by_token(secret)
        if known is not None:
            return known
        name, colon, password = secret.partition(b":")
        return self.by_password(name.decode("latin-1"), password) if colon else None

    def _holder(self, proof: Proof, name: str | None = None) -> Known | None:
        found = self._proofs.get(proof)
        if found is None or name not in (None, found):
            return None
        return Known(self.users[found], proof)


# ---- secrets ----


def name_in(secret: bytes) -> str:
    """The user's name in a secret `NAME:PASSWORD`; empty: it has none, as a token."""
    name, colon, _ = secret.partition(b":")
    return name[:_LONGEST_NAME].decode("latin-1") if colon else ""


def hash_token(token: bytes) -> str:
    """The value of `token_sha256` for a token. Raises ValueError if it is too short or not
    printable."""
    _check_token(token)
    return hashlib.sha256(token).hexdigest()


def hash_password(password: bytes) -> str:
    """The value of `password` for a password. Raises ValueError if it is empty."""
    if not password:
        raise ValueError("a password must not be empty")
    salt = secrets.token_bytes(_SALT_BYTES)
    found = _scrypt(password, salt, *_COST)
    cost = ":".join(map(str, _COST))
    return f"scrypt:{cost}:{_encoded(salt)}:{_encoded(found)}"


def _check_token(token: bytes) -> None:
    if len(token) < SHORTEST_TOKEN or not all(0x21 <= byte < 0x7F for byte in token):
        raise ValueError(
            f"a token must have at least {SHORTEST_TOKEN} printable ASCII characters and no "
            "space; `openssl rand -hex 32` makes one"
        )


def _token(digest: bytes) -> Proof:
    return Proof("token", hmac.digest(_KEY, digest, "sha256"))


def _mark(name: str, password: bytes, stored: str) -> bytes:
    words = b"\0".join((name.encode("latin-1", "replace"), stored.encode(), password))
    return hmac.digest(_KEY, words, "sha256")


def _scrypt(password: bytes, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    most = 2 * _MOST_SCRYPT_BYTES
    return hashlib.scrypt(
        password, salt=salt, n=1 << log_n, r=r, p=p, maxmem=most, dklen=_HASH_BYTES
    )


def _verify(stored: str, password: bytes) -> bool:
    """Whether a password is that of a hash that `_parsed` has accepted."""
    cost, salt, wanted = _parsed(stored)
    return hmac.compare_digest(_scrypt(password, salt, *cost), wanted)


def _parsed(stored: str) -> tuple[tuple[int, int, int], bytes, bytes]:
    """(cost, salt, hash) of a hash of `hash_password`. Raises ValueError."""
    words = stored.split(":")
    if len(words) != 6 or words[0] != "scrypt" or not all(map(_is_small, words[1:4])):
        raise ValueError("it must be a line of `shmq access hash password`, scrypt:14:8:1:...")
    log_n, r, p = (int(word) for word in words[1:4])
    within = all(1 <= had <= most for had, most in zip((log_n, r, p), _MOST_COST, strict=True))
    if not within or 128 * r * ((1 << log_n) + p) > _MOST_SCRYPT_BYTES + (1 << 20):
        raise ValueError(
            "its cost is out of bounds: log2(N) up to 17, r up to 32, p up to 8, and 64 MiB at most"
        )
    if log_n < 10:
        raise ValueError("its cost is too low: log2(N) must be 10 or more")
    salt, wanted = _decoded(words[4]), _decoded(words[5])
    if not 8 <= len(salt) <= 64 or len(wanted) != _HASH_BYTES:
        raise ValueError("its salt must have 8 to 64 bytes, its hash 32")
    return (log_n, r, p), salt, wanted


def _is_small(word: str) -> bool:
    return 1 <= len(word) <= 3 and word.isascii() and word.isdecimal()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", text):
        raise ValueError("its salt and its hash must be base64, as `shmq access hash` writes them")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


#: A hash that no password has: a name that is not there takes as long as one that is.
_NOBODYS: Final = (
    f"scrypt:{':'.join(map(str, _COST))}:{_encoded(bytes(_SALT_BYTES))}:"
    f"{_encoded(bytes(_HASH_BYTES))}"
)


# ---- parts of the file ----


def _only(table: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise BadAccessFile(f"{where}: unknown key {key!r}; there are {', '.join(keys)}")


def _items(table: Mapping[str, Any], key: str, where: str) -> list[tuple[Any, str]]:
    """The values of a key that has one or a list of them, each with its place."""
    if key not in table:
        return []
    value = table[key]
    if not isinstance(value, list):
        return [(value, f"{where}.{key}")]
    if not value:
        raise BadAccessFile(f"{where}.{key} is empty: leave it out, or name something")
    return [(item, f"{where}.{key}[{number}]") for number, item in enumerate(value)]


def _proofs_of(name: str, table: Mapping[str, Any], where: str) -> Iterator[tuple[Proof, str]]:
    """The proofs of a user, each with its place. No error quotes a secret."""
    if name == ANONYMOUS:
        for key in _PROOF_KEYS:
            if key in table:
                raise BadAccessFile(
                    f"{where}.{key}: {ANONYMOUS} is who brings no proof; give it to another user"
                )
        yield Proof("none"), where
        return
    if not any(key in table for key in _PROOF_KEYS):
        raise BadAccessFile(f"{where} has no proof: give one of {', '.join(_PROOF_KEYS)}")
    for item, place in _items(table, "token", where):
        try:
            _check_token(_text(item, place).encode())
        except ValueError as exc:
            raise BadAccessFile(f"{place}: {exc}") from None
        yield _token(hashlib.sha256(item.encode()).digest()), place
    for item, place in _items(table, "token_sha256", where):
        if not _SHA256.match(_text(item, place).lower()):
            raise BadAccessFile(
                f"{place}: it must have 64 hexadecimal digits, as `shmq access hash token` prints"
            )
        yield _token(bytes.fromhex(item)), place
    for number, (item, place) in enumerate(_items(table, "password", where)):
        if number:
            raise BadAccessFile(f"{place}: a user has one password")
        try:
            _parsed(_text(item, place))
        except ValueError as exc:
            raise BadAccessFile(f"{place}: {exc}") from None
        yield Proof("password", (name, item)), place
    for item, place in _items(table, "certificate", where):
        try:
            subject = _subject_of(list(reversed(_rfc4514(_text(item, place)))))
        except ValueError as exc:
            raise BadAccessFile(f"{place}: {exc}") from None
        yield Proof("certificate", subject), place
    for item, place in _items(table, "uid", where):
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise BadAccessFile(f"{place}: it must be the uid or the name of a user of this host")
        try:
            uid = uid_of(item)
        except ValueError:
            raise BadAccessFile(f"{place}: {item!r} is no user of this host") from None
        if uid >= 1 << 32:
            raise BadAccessFile(f"{place}: {item!r} is no user of this host")
        yield Proof("uid", uid), place


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadAccessFile(f"{where} must be text")
    return value


def _rules_of(table: Mapping[str, Any], where: str) -> Iterator[Rule]:
    found = table.get("allow", [])
    if not isinstance(found, list):
        raise BadAccessFile(f"{where}.allow must be a list of rules, [{{ do = [...] }}, ...]")
    for number, item in enumerate(found):
        place = f"{where}.allow[{number}]"
        if not isinstance(item, dict):
            raise BadAccessFile(f"{place} must be a rule, {{ do = [...], topics = [...] }}")
        _only(item, _RULE_KEYS, place)
        acts: set[str] = set()
        for act, each in _items(item, "do", place):
            if act not in (*ACTS, ALL):
                raise BadAccessFile(
                    f"{each}: there is no act {act!r}; there are {', '.join(ACTS)} and {ALL}"
                )
            acts |= set(ACTS) if act == ALL else {act}
        if not acts:
            raise BadAccessFile(f"{place} grants nothing: it needs do = [...]")
        topics, channels = (_globs(item, key, place) for key in ("topics", "channels"))
        of_topics = acts & _WITHOUT_CHANNEL
        if "channels" in item and of_topics:
            raise BadAccessFile(
                f"{place}.channels: {' and '.join(sorted(of_topics))} concerns no channel; give "
                "it a rule of its own"
            )
        yield Rule(place, frozenset(acts), topics, channels)


def _globs(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
    """The patterns of a key; None: they match everything."""
    found = []
    for item, place in _items(table, key, where):
        glob = _text(item, place)
        if not _GLOB.match(glob):
            raise BadAccessFile(
                f"{place}: {glob!r} is no pattern of names: use the characters of a name, * for "
                "any characters, ? for one and [...] for one of some"
            )
        if glob.count("#") > glob.count("#ephemeral") or "#" in glob.removesuffix(EPHEMERAL):
            raise BadAccessFile(f"{place}: {glob!r} can match no name: only {EPHEMERAL} has a #")
        if "[" in re.sub(r"\[!?\]?[^]]*\]", "", glob):
            raise BadAccessFile(f"{place}: {glob!r} has a [ without its ]")
        found.append(glob)
    return None if not found or "*" in found else tuple(found)


def _quota_of(table: Mapping[str, Any], where: str) -> Quota:
    found = table.get("quota", {})
    place = f"{where}.quota"
    if not isinstance(found, dict):
        raise BadAccessFile(f"{place} must be a table, {{ connections = 10 }}")
    _only(found, _QUOTA_KEYS, place)
    return Quota(**{key: _number(value, f"{place}.{key}") for key, value in found.items()})


def _number(value: Any, where: str) -> int:
    is_bytes = where.endswith("_bytes")
    if isinstance(value, str) and is_bytes and (size := _SIZE.match(value)):
        value = int(size[1]) * _UNITS[size[2]]
    least = 1 if where.endswith("_per_second") else 0
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_NUMBER:
        words = "a number of bytes, such as 65536 or '64MiB'" if is_bytes else "a whole number"
        raise BadAccessFile(f"{where} must be {words}, {least} or more")
    return value


# ---- patterns ----


def _covers(globs: tuple[str, ...] | None, name: str) -> bool:
    """Whether patterns match a name. No patterns match everything, and an empty name stands for
    everything."""
    return globs is None or (bool(name) and any(_compiled(glob)(name) for glob in globs))


@functools.lru_cache(4096)
def _compiled(glob: str) -> Callable[[str], Any]:
    """A function that tells whether a whole name matches, with upper and lower case. Its time is
    bounded by the product of the lengths: the translation does not go back behind a star."""
    return re.compile(fnmatch.translate(glob)).match


def _quoted(words: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


# ---- certificates ----

#: RFC 4514's names of the parts of a subject -> Python's, in lower case.
_PARTS: Final = {
    "cn": "commonname",
    "o": "organizationname",
    "ou": "organizationalunitname",
    "c": "countryname",
    "st": "stateorprovincename",
    "l": "localityname",
    "dc": "domaincomponent",
    "uid": "userid",
    "street": "streetaddress",
    "email": "emailaddress",
}
_PART: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*|[0-9]+(?:\.[0-9]+)+)\s*=\s*")
_VALUE: Final = re.compile(r"(?:[^\\,+\"<>;]|\\[0-9a-fA-F]{2}|\\[ \"#+,;<=>\\])*")
_ESCAPE: Final = re.compile(rb"\\([0-9a-fA-F]{2}|.)", re.DOTALL)


def _subject_of(pairs: Iterable[tuple[str, str]]) -> frozenset[tuple[str, tuple[str, ...]]]:
    """A subject in a form that can be compared: the order counts only among parts of one name."""
    found: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        key = _PARTS.get(name.lower(), name.lower())
        found[key] = (*found.get(key, ()), value)
    return frozenset(found.items())


def subject_text(subject: Iterable[Iterable[tuple[str, str]]]) -> str:
    """A certificate's subject as the access file may have it: `CN=scanner,O=Acme`. It has printable
    characters only. subject: as in `ssl.getpeercert`."""
    short = {long: key.upper() for key, long in _PARTS.items()}
    pairs = [pair for entry in subject for pair in entry]
    parts = (f"{short.get(name.lower(), name)}={_escaped(value)}" for name, value in pairs[::-1])
    return printable(",".join(parts), LONGEST)


def _escaped(value: str) -> str:
    value = re.sub(r'([,+"\\<>;=])', r"\\\1", value)
    if len(value) > 1 and value.endswith(" "):
        value = f"{value[:-1]}\\ "
    return f"\\{value}" if value[:1] in ("#", " ") else value


def _rfc4514(text: str) -> list[tuple[str, str]]:
    """The parts of a subject that is written as RFC 4514 has it. Raises ValueError."""
    pairs, at = [], 0
    while True:
        part = _PART.match(text, at)
        if part is None or text[part.end() : part.end() + 1] == "#":
            raise ValueError(f"{text!r} is no subject, as CN=scanner,O=Acme")
        value = _VALUE.match(text, part.end())
        assert value is not None
        raw = value[0]
        while raw.endswith(" ") and not raw.endswith("\\ "):
            raw = raw[:-1]
        pairs.append((part[1], _unescaped(raw)))
        at = value.end()
        if not pairs[-1][1]:
            raise ValueError(f"{text!r}: {part[1]} is empty")
        if at == len(text):
            return pairs
        if text[at] not in ",+":
            raise ValueError(f"{text!r} is no subject, as CN=scanner,O=Acme")
        at += 1


def _unescaped(raw: str) -> str:
    def byte(match: re.Match[bytes]) -> bytes:
        found = match[1]
        return bytes.fromhex(found.decode()) if len(found) == 2 else found

    try:
        return _ESCAPE.sub(byte, raw.encode()).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{raw!r} is not UTF-8") from None
