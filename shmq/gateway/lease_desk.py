"""The lease requests of all clients of one gateway process, as calls into the broker. They may take
long, so they are made in the process's pool of threads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from shmq.audit import note, result_of
from shmq.broker import Broker
from shmq.client import Lease, LeasedBatch, LeaseHolder
from shmq.client.lease import Elsewhere
from shmq.door.seldom import Seldom
from shmq.errors import BadArgument, Gone, MemoryLost, NotRunning, ShmqError
from shmq.gateway.asker import Asker, Key
from shmq.gateway.lease_requests import Values
from shmq.gateway.staged import StagedRows
from shmq.layout import constant
from shmq.leased import proof_of
from shmq.options import Options
from shmq.remote.counts import ChannelCounts
from shmq.remote.rows import after, framed
from shmq.seal import check_open

if TYPE_CHECKING:
    from shmq.views import DirectoryView

_Names = tuple[str, ...]
_Answer = dict[str, Any]

#: Of the 64 names and the 64 open leases of a channel, those that one client on the network may
#: have. Those that hold nothing give way where there is no room.
_NAMES: Final = 16
_LEASES: Final = 32
#: Seconds after which the settings of all topics are looked at again although nobody has announced
#: a change: who changed them may have died before that.
_LOOK_AGAIN: Final = 1.0

_limits = Seldom(logging.getLogger(__name__), "limits of leases that clients hit")


class Cursor:
    """One part of a lease, read from a message on."""

    def __init__(self, identity: str, batches: Iterator[LeasedBatch], at: int) -> None:
        """at: index of the first message that is wanted."""
        self.identity = identity
        """Of the channel."""
        self._batches = batches
        self._at = 0
        self._skip = at

    def frame(self) -> tuple[list[bytes], int] | None:
        """The pieces of the next frame and the number of its messages; None after the last. Raises
        LeaseLost."""
        for batch in self._batches:
            count = len(batch)
            if self._skip >= count:
                self._skip -= count
                self._at += count
                continue
            found = after(batch, self._skip) if self._skip else batch
            first = self._at + self._skip
            self._at, self._skip = self._at + count, 0
            return framed(first, found), len(found)
        return None


@dataclasses.dataclass(frozen=True)
class _Sealed:
    """A look at the settings of all topics. at: monotonic seconds."""

    generation: int
    at: float
    dead: dict[str, str]


class LeaseDesk:
    """Answers requests. A holder is known by its channel and its incarnation, so any process of the
    gateway answers for any holder. It keeps only which holders' clients are connected to this
    process: with the last connection of such a client `grace` begins."""

    def __init__(
        self,
        broker: Broker,
        create_topic: Callable[[str], None],
        create_channel: Callable[[str, str], None],
        version: str,
        options: Callable[[], Options],
    ) -> None:
        """create_topic, create_channel: if they are missing. options: the present ones."""
        self._broker = broker
        self._create_topic = create_topic
        self._create_channel = create_channel
        self._version = version
        self._options = options
        self._staged = StagedRows(broker, lambda: options().staged_ttl)
        self._lock = threading.Lock()
        self._connections: Counter[Key] = Counter()
        self._sealed = _Sealed(-1, 0.0, {})

    def answer(
        self, asker: Asker, command: bytes, names: _Names, values: Values, rows: bytes
    ) -> _Answer:
        """The document that answers a request. Raises ShmqError, ValueError, OSError."""
        action = _AUDITED.get(command, "")
        try:
            if names and command != b"LINFO":  # which gives counts alone
                self._check_open(names[0], command.decode())
            answer = _CALLS[command](self, asker, names, values, rows)
        except ShmqError as exc:
            if type(exc) is ShmqError and command in (b"LHOLD", b"LEASE"):  # a table is full
                what = f"{command.decode()} {'/'.join(names)}"
                _limits(logging.WARNING, "%s: client(%s): %s", what, asker.address, exc)
            if action and not isinstance(exc, Gone | NotRunning):
                topic, channel = (*names, "")[:2]
                note(action, topic, channel, result_of(exc))
            raise
        finally:
            if asker.gone:
                self.leave(asker)
        if action:
            _audit(action, names, values, answer)
        return answer

    def leave(self, asker: Asker) -> None:
        """The client's connection has ended: `grace` begins for the holders that no other
        connection to this process has used, unless another process speaks for them by now."""
        asker.gone = True
        for key, holder in list(asker.holders.items()):
            if self._forget(asker, key):
                with contextlib.suppress(ShmqError):
                    holder.leave()

    def _use(self, asker: Asker, key: Key, holder: LeaseHolder) -> None:
        with self._lock:
            if key not in asker.holders:
                asker.holders[key] = holder
                self._connections[key] += 1

    def _forget(self, asker: Asker, key: Key) -> bool:
        """Returns true if no other connection has used the holder."""
        with self._lock:
            if asker.holders.pop(key, None) is None:
                return False
            self._connections[key] -= 1
            if self._connections[key] > 0:
                return False
            del self._connections[key]
            return True

    def _check_open(self, topic: str, tried: str) -> None:
        """As `seal.check_open`; the dead letters of a sealed topic may also have a topic that its
        settings, or those of a channel of it, name. SUB finds those by their seals."""
        check_open(self._broker, topic, tried)
        directory, now = self._broker.directory(), time.monotonic()
        generation = directory.read("generation")  # every change of settings raises it
        known = self._sealed
        if known.generation != generation or now - known.at >= _LOOK_AGAIN:
            known = self._sealed = _Sealed(generation, now, self._dead_letters(directory))
        if (sealed := known.dead.get(topic)) is not None:
            check_open(self._broker, sealed, f"{tried} {topic!r}")

    def _dead_letters(self, directory: DirectoryView) -> dict[str, str]:
        """Topics that settings name for dead letters -> the sealed topic whose settings these
        are."""
        table, found = directory.topics, {}
        flags = table["settings"]["flags"] & constant("SEALED_ONLY")  # two copies of each
        for index in sorted({int(row) for row in flags.nonzero()[0]}):
            name = directory.topic_name(table, index)
            if name is None or not self._is_sealed(name):
                continue
            queues = directory.live_queues()
            mine = [None, *(each.channel for each in queues if each.topic == index)]
            for channel in mine:
                with contextlib.suppress(Gone):
                    if dead := self._broker.settings(name, channel).dead_letter:
                        found[dead] = name
        return found

    def _is_sealed(self, topic: str) -> bool:
        with contextlib.suppress(Gone):
            return self._broker.settings(topic).sealed
        return False

    def sweep(self) -> None:
        """Remove the staged rows whose time is over."""
        self._staged.sweep()

    def open_part(self, names: _Names, values: Values) -> Cursor:
        """Begin LREAD. Raises Gone, MemoryLost, LeaseFenced, LeaseLost, and BadArgument if the
        client does not say whose the lease is."""
        topic, channel = names
        self._check_open(topic, "LREAD")
        lease, holder, secret = values["lease"], values["holder"], values["secret"]
        identity = self._same_channel(names, values)
        if holder is None and secret is None:
            raise BadArgument("LREAD needs the holder of the lease, or the secret of its name")
        proof = None if secret is None else proof_of(secret)
        known = None if holder is None else _incarnation(holder)
        self._broker.check_reader(topic, channel, lease, known, proof)
        batches = self._broker.read_lease(
            topic,
            channel,
            lease,
            values["part"],
            values["rows"],
            values["bytes"],
            values["properties"],
        )
        if self._same_channel(names, values) != identity:
            raise MemoryLost(f"{topic}/{channel} was deleted and created again meanwhile")
        return Cursor(identity, batches, values["from"])

    def is_over(self, error: BaseException) -> bool:
        """Whether an error says only that the supervisor or the instance has ended, and this
        process with it: another one may answer."""
        if not isinstance(error, Gone | NotRunning):
            return False
        return self._broker.closed or self._broker.ended or not self._broker.supervisor_alive()

    # ---- the instance and its channels ----

    def _info(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        broker = self._broker
        answer: _Answer = {"memory": broker.identity}
        if not names:
            return answer | {
                "instance": broker.instance,
                "limits": broker.limits,
                "version": self._version,
            }
        topic, channel = names
        answer["identity"] = broker.channel_identity(topic, channel)
        answer["depth"] = int(broker.channel_depth(topic, channel))
        if values["stats"]:
            found = broker.channel_stats(topic, channel)
            answer["stats"] = {name: _plain(getattr(found, name)) for name in _COUNTS}
        return answer

    def _make(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        if len(names) == 1:
            self._create_topic(names[0])
        else:
            self._create_channel(*names)
        return {"memory": self._broker.identity}

    def _same_channel(self, names: _Names, values: Values) -> str:
        """The identity of the channel. Raises MemoryLost if the request names another, and Gone if
        there is no such channel in the same memory."""
        asked = values.get("identity")
        memory = self._broker.identity.partition("@")[0]
        where = "/".join(names)
        if asked is not None and asked.partition("-")[0] != memory:
            raise MemoryLost(
                f"{where} was asked for as {asked}, but the broker was started with fresh memory "
                f"since ({memory}): its leases of before are gone, their messages were flushed to "
                "disk, or lost with the memory"
            )
        identity = self._broker.channel_identity(*names)
        if asked is not None and asked != identity:
            raise MemoryLost(
                f"{where} was asked for as {asked}, but the channel was deleted and created again "
                f"since ({identity}): its leases of before are gone"
            )
        return identity

    # ---- holders ----

    def _most(self, asker: Asker) -> int:
        """The open leases of a channel that a client may have."""
        return _LEASES if asker.quota.leases is None else asker.quota.leases

    def _holder(self, asker: Asker, names: _Names, values: Values) -> tuple[LeaseHolder, str]:
        """The holder of a request, which lives as long as this process and its connection from now
        on, and the identity of its channel. Raises LeaseFenced, MemoryLost, Gone."""
        identity = self._same_channel(names, values)
        topic, channel = names
        incarnation = _incarnation(values["holder"])
        most = self._most(asker)
        known = self._broker.lease_holder_known(topic, channel, incarnation, most)
        known.adopt()
        self._use(asker, (topic, channel, *incarnation), known)
        return known, identity

    def _hold(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        if values["holder"] is not None:
            _, identity = self._holder(asker, names, values)
            return {"identity": identity, "holder": values["holder"]}
        topic, channel = names
        self._create_channel(topic, channel)
        if values["free"]:
            self._broker.check_free(topic, channel, values["name"], "somebody")
        longest = self._options().max_lease_ttl
        ttl = min(longest, values["ttl"] or longest)
        grace = min(longest, values["grace"] or ttl)
        proof = proof_of(values["secret"] or secrets.token_hex(16))
        whose = Elsewhere(asker.whose, asker.known, _NAMES, self._most(asker))
        opened = self._broker.lease_holder_for(
            topic, channel, values["name"], (ttl, grace), False, proof, whose
        )
        self._use(asker, (topic, channel, *opened.incarnation), opened)
        identity = self._same_channel(names, values)
        entry, bits = opened.incarnation
        return {"identity": identity, "holder": [entry, f"{bits:016x}"], "ttl": ttl}

    def _keep(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        _, identity = self._holder(asker, names, values)
        return {"identity": identity}

    def _close(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(asker, names, values)
        self._forget(asker, (names[0], names[1], *holder.incarnation))
        holder.close()
        return {"identity": identity}

    def _list(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(asker, names, values)
        return {"identity": identity, "leases": [_row(lease) for lease in holder.leases()]}

    def _look(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(asker, names, values)
        return {"identity": identity, "lease": _row(holder.look(values["lease"], values["replay"]))}

    def _lease(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        """Lease, or return the lease that an earlier try of the same request took: an open one with
        this parent, that is newer than the newest that the client knew."""
        holder, identity = self._holder(asker, names, values)
        parent = values["parent"]
        known = parent if values["after"] is None else values["after"]
        found = next(
            (each for each in holder.leases() if each.parent == parent and each.id > known), None
        )
        if found is None:
            found = holder.lease(values["n"], values["max_bytes"], values["parts"], parent)
        return {"identity": identity, "lease": None if found is None else _row(found)}

    def _finish(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(asker, names, values)
        return {"identity": identity, "messages": holder.finish_lease(values["through"])}

    def _return(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(asker, names, values)
        return {"identity": identity, "messages": holder.return_lease(values["lease"])}

    def _wait(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        """Whether there may be something to lease now; the session asks again."""
        holder, identity = self._holder(asker, names, values)
        return {"identity": identity, "ready": holder.wait(0)}

    # ---- staged rows ----

    def _stage(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        self._create_topic(names[0])
        found = self._staged.stage(asker, names[0], values, rows)
        return {"memory": self._broker.identity, **found}

    def _commit(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        self._create_topic(names[0])
        published, done = self._staged.commit(asker, names[0], values)
        return {"memory": self._broker.identity, "published": published, "done": done}

    def _abandon(self, asker: Asker, names: _Names, values: Values, rows: bytes) -> _Answer:
        attempts = self._staged.abandon(names[0], values)
        return {"memory": self._broker.identity, "abandoned": attempts}


_COUNTS: Final = tuple(each.name for each in dataclasses.fields(ChannelCounts))

_CALLS: Final[dict[bytes, Callable[[LeaseDesk, Asker, _Names, Values, bytes], _Answer]]] = {
    b"LINFO": LeaseDesk._info,
    b"LMAKE": LeaseDesk._make,
    b"LHOLD": LeaseDesk._hold,
    b"LKEEP": LeaseDesk._keep,
    b"LCLOSE": LeaseDesk._close,
    b"LLIST": LeaseDesk._list,
    b"LLOOK": LeaseDesk._look,
    b"LFIN": LeaseDesk._finish,
    b"LRET": LeaseDesk._return,
    b"LWAIT": LeaseDesk._wait,
    b"LEASE": LeaseDesk._lease,
    b"STAGE": LeaseDesk._stage,
    b"COMMIT": LeaseDesk._commit,
    b"ABANDON": LeaseDesk._abandon,
}


#: Request -> action in the audit log.
_AUDITED: Final[dict[bytes, str]] = {
    b"LHOLD": "hold_leases",
    b"LEASE": "lease",
    b"LFIN": "finish_lease",
    b"LRET": "return_lease",
    b"COMMIT": "commit_rows",
    b"ABANDON": "abandon_rows",
}


def _audit(action: str, names: _Names, values: Values, answer: _Answer) -> None:
    """Write a line, unless the request has changed nothing. No secret is in it."""
    more: dict[str, Any] = {}
    if action == "hold_leases":
        more = {"name": values["name"]}
    elif action == "lease":
        if answer["lease"] is None:
            return
        more = {"lease": answer["lease"][0], "messages": answer["lease"][2]}
    elif action in ("finish_lease", "return_lease"):
        if not answer["messages"]:
            return
        lease = values["through"] if action == "finish_lease" else values["lease"]
        more = {"lease": lease, "messages": answer["messages"]}
    else:
        count = answer["published" if action == "commit_rows" else "abandoned"]
        if not count:
            return
        what = "messages" if action == "commit_rows" else "attempts"
        more = {"writer": values["writer"], "epoch": values["epoch"], what: count}
    topic, channel = (*names, "")[:2]
    note(action, topic, channel, **more)


def _incarnation(holder: Any) -> tuple[int, int]:
    entry, bits = holder
    return int(entry), int(bits, 16)


def _plain(value: Any) -> bool | int | float | None:
    """A count as JSON has it; numpy's numbers it does not."""
    if value is None or isinstance(value, bool | float):
        return value
    return int(value)


def _row(lease: Lease) -> list[int]:
    return list(dataclasses.astuple(lease))
