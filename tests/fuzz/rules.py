"""Access rules that are drawn from an input, commands and requests of users under them, and an
oracle that knows nothing of the product's code: all that was done and told is what the rules allow.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from typing import Any

from support.session_without_socket import Desk, Host, Topic, drive

import shmq
from shmq import prometheus
from shmq.gateway import nsqd_stats
from shmq.gateway.host import Grant
from shmq.gateway.protocol import ProtocolError
from shmq.gateway.rights import Rights, is_permitted
from shmq.options import Options
from shmq.stats import BrokerStats
from shmq.users import Users

ACTS = ("publish", "subscribe", "lease", "stage", "administer", "statistics", "bodies")
TOPICS = ("a", "ab", "abc", "b", "ba", "c-1")
CHANNELS = ("x", "xy", "y", "z.9")
#: Patterns, each with the names of TOPICS and CHANNELS that it matches, found by hand.
GLOBS = (
    ("*", {*TOPICS, *CHANNELS}),
    ("a", {"a"}),
    ("a*", {"a", "ab", "abc"}),
    ("?", {"a", "b", "x", "y"}),
    ("*b", {"ab", "b"}),
    ("[xb]*", {"b", "ba", "x", "xy"}),
    ("[!a]?", {"ba", "xy"}),
    ("?-1", {"c-1"}),
    ("z.?", {"z.9"}),
)
SECRETS = {"one": b"the-token-of-user-one", "two": b"the-token-of-user-two"}
#: Requests that name it fail for a reason of the host, which no answer may have.
FAILS = "c-1"
SECRET_OF_HOST = "/dev/shm/shmq-staged-x"
#: Commands of TCP, with the acts of which one is needed: where a channel is named, and where not.
NEEDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("PUB", "MPUB", "DPUB"), ("publish", "publish")),
    "SUB": ("subscribe", "subscribe"),
    "LINFO": ("lease subscribe statistics", "lease subscribe statistics"),
    "LMAKE": ("subscribe lease administer", "publish stage administer"),
    **dict.fromkeys(("LHOLD", "LKEEP", "LCLOSE", "LLIST", "LLOOK"), ("lease", "lease")),
    **dict.fromkeys(("LFIN", "LRET", "LWAIT", "LEASE", "LREAD"), ("lease", "lease")),
    **dict.fromkeys(("STAGE", "COMMIT", "ABANDON"), ("stage", "stage")),
}
_OF_TOPICS = ("PUB", "MPUB", "DPUB", "STAGE", "COMMIT", "ABANDON")
ANSWER = {
    "lease": 1,
    "holder": [1, "0" * 16],
    "n": 1,
    "name": "w",
    "ttl": None,
    "timeout": 0,
    "credit": 5,
    "from": 0,
    "through": 1,
    "bytes": 1000,
    "at": 0,
    "secret": "0" * 16,
    "writer": "w",
    "epoch": 1,
    "rows": 1,
    "attempt": "0" * 32,
    "token": "0" * 16,
    "attempts": [{"attempt": "0" * 32, "rows": 1, "size": 9}],
}


class Draw:
    """Numbers from the bytes of an input."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, most: int) -> int:
        value = self._data[self._at] if self else 0
        self._at += 1
        return value % most

    def of(self, items: Any) -> Any:
        return items[self.below(len(items))]


class Allowed:
    """The oracle: the rules of one user as they were drawn."""

    def __init__(self) -> None:
        self.rules: list[tuple[set[str], set[str] | None, set[str] | None]] = []

    def may(self, words: str, topic: str = "", channel: str = "") -> bool:
        """Whether one of these acts is granted. Without names it must be granted everywhere."""
        return any(
            act in acts
            and (topics is None or topic in topics)
            and (act in ("publish", "stage") or channels is None or channel in channels)
            for act in words.split()
            for acts, topics, channels in self.rules
        )


def drawn_rules(draw: Draw) -> tuple[str, dict[str, Allowed]]:
    """The text of an access file, and what it means."""
    lines: list[str] = []
    users: dict[str, Allowed] = {}
    for name in ("anonymous", "one", "two"):
        allowed = Allowed()
        if name == "anonymous" and draw.below(3):
            continue
        users[name] = allowed
        rules = []
        for _ in range(draw.below(6)):
            bits = draw.below(256) | (255 if draw.below(3) == 0 else 0)
            acts = {act for number, act in enumerate(ACTS) if bits >> number & 1}
            topics, channels = (draw.of((None, None, *GLOBS)) for _ in range(2))
            if channels is not None:
                acts -= {"publish", "stage"}
            if not acts:
                continue
            text = f"do = {json.dumps(sorted(acts))}"
            found: list[set[str] | None] = []
            for key, glob in (("topics", topics), ("channels", channels)):
                if glob is not None:
                    text += f', {key} = ["{glob[0]}"]'
                found.append(None if glob is None or glob[0] == "*" else glob[1])
            rules.append(f"{{ {text} }}")
            allowed.rules.append((acts, found[0], found[1]))
        lines.append(f"[users.{name}]")
        if name in SECRETS:
            lines.append(f"token = {json.dumps(SECRETS[name].decode())}")
        lines.append(f"allow = [{', '.join(rules)}]")
    return "\n".join(lines), users


class Guarded(Host):
    """A process with an access file. The oracle is asked about each effect."""

    def __init__(self, rights: Rights, users: dict[str, Allowed]) -> None:
        super().__init__()
        self.rights = rights
        self.users = users
        self.who: list[str] = []
        self.wrong: list[tuple[str, ...]] = []
        """Effects that the rules do not allow; a job would keep an exception for itself."""
        self.auth_enabled = True
        self.leases = Watched(self)

    def check(self, command: str, topic: str, channel: str) -> None:
        """An effect of a command reached the process."""
        if not self.who:
            self.wrong.append(("nobody", command, topic, channel))
            return
        needs = NEEDS[command][0 if channel else 1]
        allowed = self.users[self.who[-1]].may(needs, topic, channel)
        if not allowed and (command != "LINFO" or topic):
            self.wrong.append((self.who[-1], command, topic, channel))

    def greet(self, client: Any) -> Grant | None:
        return self.rights.greet(client.uid, ())

    def turned_away(self, client: Any) -> None:
        pass

    def needs_auth(self, wanted: Any) -> bool:
        return self.rights.needs_auth

    def again(self, grant: Grant) -> Grant | None:
        return self.rights.again(grant)

    def enter(self, grant: Grant) -> str:
        self.who.append(grant.identity)
        return self.rights.enter(grant)

    def leave(self, grant: Grant) -> None:
        self.rights.leave(grant)

    def pause(self, grant: Grant) -> float:
        return 0.0

    def spend(self, grant: Grant, messages: int) -> None:
        pass

    def query_auth(self, client: Any, secret: bytes) -> Grant | None:  # type: ignore[override]
        return self.rights.login(secret)

    def open_producer(self, topic: bytes) -> Any:
        self.check("PUB", topic.decode(), "")
        made = self.producers[topic] = WatchedTopic(self, topic.decode())
        return made

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Any:
        self.check("SUB", topic.decode(), channel.decode())
        raise ProtocolError("E_SUB_FAILED", f"SUB failed {_mark(topic.decode(), channel.decode())}")


class WatchedTopic(Topic):
    """A topic whose publishes are held against the oracle."""

    def __init__(self, host: Guarded, name: str) -> None:
        super().__init__(host)
        self._name = name
        self._guarded = host

    def publish_framed(self, *arguments: Any) -> int:
        self._guarded.check("PUB", self._name, "")
        return super().publish_framed(*arguments)

    def publish_run(self, *arguments: Any) -> tuple[int, int, int]:
        before = len(self._guarded.published)
        found = super().publish_run(*arguments)
        if len(self._guarded.published) > before:
            self._guarded.check("PUB", self._name, "")
        return found


class Watched(Desk):
    """Lease requests that are held against the oracle; their answers say of what they are."""

    def __init__(self, host: Guarded) -> None:
        super().__init__()
        self._host = host

    def answer(  # type: ignore[override]
        self, asker: Any, command: bytes, names: Any, values: Any, rows: bytes
    ) -> Any:
        topic, channel = (*names, "", "")[:2]
        self._host.check(command.decode(), topic, channel)
        if topic == FAILS:
            raise shmq.ShmqError(f"{command.decode()} {topic}: no: {SECRET_OF_HOST}, uid 0; rm it")
        return {"identity": "1-2", "lease": [1], "ready": True, "said": _mark(topic, channel)}

    def open_part(self, names: Any, values: Any) -> Any:
        self._host.check("LREAD", *names)
        return super().open_part(names, values)


def _mark(topic: str, channel: str) -> str:
    return f"what-is-in:{topic}:{channel}:"


def _auth(secret: bytes) -> bytes:
    return b"AUTH\n" + struct.pack(">i", len(secret)) + secret


def _command(name: str, topic: str, channel: str) -> bytes:
    sized = struct.pack(">i", 4) + b"body"
    if name == "PUB":
        return f"PUB {topic}\n".encode() + sized
    if name == "DPUB":
        return f"DPUB {topic} 5\n".encode() + sized
    if name == "MPUB":
        return f"MPUB {topic}\n".encode() + struct.pack(">ii", 12, 1) + sized
    if name == "SUB":
        return f"SUB {topic} {channel}\n".encode()
    names = " ".join(filter(None, (topic, channel)))
    body = json.dumps(ANSWER).encode()
    if name == "STAGE":
        body = struct.pack(">i", len(body)) + body + struct.pack("<I", 1) + b"r"
    return f"{name} {names}".strip().encode() + b"\n" + struct.pack(">i", len(body)) + body


def session(data: bytes) -> None:
    """Commands of TCP by users whose rules are drawn."""
    draw = Draw(data)
    text, users = drawn_rules(draw)
    rights = Rights(Options())
    rights.users = Users.parse(text)
    stream = [b"  V2"]
    if draw.below(4):
        wishes = json.dumps({"feature_negotiation": True, "leases": True}).encode()
        stream.append(b"IDENTIFY\n" + struct.pack(">i", len(wishes)) + wishes)
    if draw.below(4):
        stream.append(_auth(draw.of(tuple(SECRETS.values()))))
    while draw and len(stream) < 14:
        name = draw.of(("AUTH", *NEEDS))
        if name == "AUTH":
            secret = draw.of((*SECRETS.values(), b"the-token-of-user-on", b"anonymous", b""))
            stream.append(_auth(secret))
            continue
        topic = draw.of(TOPICS)
        channel = draw.of(CHANNELS)
        if name in _OF_TOPICS or (name == "LMAKE" and draw.below(2)) or name == "LINFO":
            channel = ""
            topic = "" if name == "LINFO" else topic
        stream.append(_command(name, topic, channel))
    data = b"".join(stream)
    host = Guarded(rights, users)
    cut = draw.below(256) * len(data) // 256
    said = drive(data, [cut] if cut else [], host).said.decode("latin-1")
    assert not host.wrong, host.wrong
    assert SECRET_OF_HOST not in said, said
    assert "uid 0" not in said, said
    for topic, channel in itertools.product(TOPICS, ("", *CHANNELS)):
        if _mark(topic, channel) in said:
            acts = " ".join(ACTS)
            assert any(users[name].may(acts, topic, channel) for name in host.who), (topic, channel)


# ---- HTTP ----

#: Path -> the acts of which one is needed, for GET and other methods: on its names, or (`*`) on the
#: instance, or (`~`) anywhere, where the answer is filtered.
HTTP_NEEDS = {
    **dict.fromkeys(("/pub", "/mpub"), "publish"),
    **dict.fromkeys(("/stats", "/metrics", "/info"), "~statistics"),
    **dict.fromkeys(("/topic/delete", "/topic/empty"), "administer"),
    **dict.fromkeys(("/topic/pause", "/topic/unpause"), "administer"),
    **dict.fromkeys(("/channel/delete", "/channel/empty"), "administer"),
    **dict.fromkeys(("/channel/pause", "/channel/unpause"), "administer"),
    "/topic/create": "publish stage administer",
    "/channel/create": "subscribe lease administer",
    **dict.fromkeys(("/config/log_level", "/debug/pprof/"), "*administer"),
    **dict.fromkeys(("/page/state", "/page/messages"), "~statistics"),
    "/new/route": "nothing",
}


def requests(data: bytes) -> None:
    """Requests of HTTP, and the statistics that their answers may have."""
    draw = Draw(data)
    text, users = drawn_rules(draw)
    rights = Rights(Options())
    rights.users = Users.parse(text)
    name = draw.of(("one", "two"))
    grant = rights.at_once(SECRETS[name])
    assert grant is not None
    assert rights.at_once(SECRETS[name][:-1]) is None
    allowed = users[name]
    _check_statistics(grant, allowed)
    while draw:
        path = draw.of(tuple(HTTP_NEEDS))
        needs = HTTP_NEEDS[path]
        is_read = needs[0] == "~" or path.startswith(("/page", "/debug"))
        method = "GET" if is_read else "PUT" if path.startswith("/config") else "POST"
        topic, channel = draw.of(TOPICS), draw.of(CHANNELS)
        named = {"topic": topic, "channel": channel}
        if not path.startswith("/channel/"):
            channel = ""
        if needs[0] == "~":
            right = any("statistics" in acts for acts, _, _ in allowed.rules)
        elif needs[0] == "*":
            right = allowed.may(needs[1:])
        else:
            right = allowed.may(needs, topic, channel)
        said = is_permitted(grant, method, path, named)
        assert said == right, (name, method, path, named, said, right)
        assert not is_permitted(grant, "DELETE", path, named)


_taken: BrokerStats | None = None
_clients: list[dict[str, Any]] = []


def prepare(directory: str, instance: str | None) -> None:
    """Make a broker with all topics and channels, and take its statistics."""
    global _taken
    with shmq.Broker(directory, instance=instance) as broker:
        for topic, channel in itertools.product(TOPICS, CHANNELS):
            broker.create_channel(topic, channel)
        for topic in TOPICS:
            broker.producer(topic).publish(b"counted")
        _taken = broker.stats()
    _clients.append({
        "pub_counts": [{"topic": topic, "count": 1} for topic in TOPICS], "session": None, "pid": 1,
        "client_id": "", "hostname": "", "remote_address": "", "user_agent": "", "connect_ts": 0,
        "message_count": 0,
    })  # fmt: skip


def _check_statistics(grant: Grant, allowed: Allowed) -> None:
    """Check that /stats and /metrics say to a user no more and no less than the rules allow."""
    assert _taken is not None
    mine = nsqd_stats.permitted(_taken, grant.allows)
    clients = nsqd_stats._permitted(_clients, grant.allows)
    stats = nsqd_stats.NsqdStats(mine, clients, "OK", 0, ())
    shown = stats.document()
    channels = set()
    for topic in shown["topics"]:
        name = topic["topic_name"]
        whole = allowed.may("statistics", name)
        assert whole or not (topic["message_count"] or topic["message_bytes"] or topic["depth"]), (
            name
        )
        channels |= {(name, channel["channel_name"]) for channel in topic["channels"]}
        assert whole or topic["channels"]
    both = itertools.product(TOPICS, CHANNELS)
    assert channels == {names for names in both if allowed.may("statistics", *names)}
    for client in shown["producers"] or ():
        for count in client.get("pub_counts", ()):
            assert allowed.may("statistics", count["topic"])
    for line in (*prometheus.exposition(mine).splitlines(), *stats.text().splitlines()):
        found = re.search(r'topic="([^"]*)"(?:,channel="([^"]*)")?', line)
        if found is not None and not line.endswith(" 0"):
            names = (found[1], found[2] or "")
            assert allowed.may("statistics", *names), line
