"""The lease requests of all clients of one gateway process, as calls into the broker. They may take
long, so they are made in the process's pool of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

from shmq.broker import Broker
from shmq.client import Lease, LeasedBatch, LeaseHolder
from shmq.errors import Gone, MemoryLost, NotRunning
from shmq.gateway.lease_requests import Values
from shmq.gateway.staged import StagedRows
from shmq.remote.counts import ChannelCounts
from shmq.remote.rows import after, framed
from shmq.seal import check_open

_Names = tuple[str, ...]
_Answer = dict[str, Any]


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


class LeaseDesk:
    """Answers requests. A holder is known by its channel and its incarnation; no state is kept
    here, so any process of the gateway answers for any holder."""

    def __init__(
        self,
        broker: Broker,
        create_topic: Callable[[str], None],
        create_channel: Callable[[str, str], None],
        version: str,
    ) -> None:
        """create_topic, create_channel: if they are missing."""
        self._broker = broker
        self._create_topic = create_topic
        self._create_channel = create_channel
        self._version = version
        self._staged = StagedRows(broker)

    def answer(self, command: bytes, names: _Names, values: Values, rows: bytes) -> _Answer:
        """The document that answers a request. Raises ShmqError, ValueError, OSError."""
        if names and command != b"LINFO":  # which gives counts alone
            check_open(self._broker, names[0], command.decode())
        return _CALLS[command](self, names, values, rows)

    def open_part(self, names: _Names, values: Values) -> Cursor:
        """Begin LREAD. Raises Gone, MemoryLost."""
        topic, channel = names
        check_open(self._broker, topic, "LREAD")
        batches = self._broker.read_lease(
            topic,
            channel,
            values["lease"],
            values["part"],
            values["rows"],
            values["bytes"],
            values["properties"],
        )
        identity = self._same_channel(names, values)
        return Cursor(identity, batches, values["from"])

    def is_over(self, error: BaseException) -> bool:
        """Whether an error says only that the supervisor or the instance has ended, and this
        process with it: another one may answer."""
        if not isinstance(error, Gone | NotRunning):
            return False
        return self._broker.closed or self._broker.ended or not self._broker.supervisor_alive()

    # ---- the instance and its channels ----

    def _info(self, names: _Names, values: Values, rows: bytes) -> _Answer:
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

    def _make(self, names: _Names, values: Values, rows: bytes) -> _Answer:
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

    def _holder(self, names: _Names, values: Values) -> tuple[LeaseHolder, str]:
        """The holder of a request, which lives as long as this process from now on, and the
        identity of its channel. Raises LeaseFenced, MemoryLost, Gone."""
        identity = self._same_channel(names, values)
        index, incarnation = values["holder"]
        topic, channel = names
        known = self._broker.lease_holder_known(topic, channel, "", (index, incarnation))
        known.adopt()
        return known, identity

    def _hold(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        if values["holder"] is not None:
            holder, identity = self._holder(names, values)
            return {"identity": identity, "holder": list(holder.incarnation)}
        topic, channel = names
        self._create_channel(topic, channel)
        grace = values["ttl"] if values["grace"] is None else values["grace"]
        opened = self._broker.lease_holder(topic, channel, values["name"], values["ttl"], grace)
        identity = self._same_channel(names, values)
        return {"identity": identity, "holder": list(opened.incarnation)}

    def _keep(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        _, identity = self._holder(names, values)
        return {"identity": identity}

    def _close(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(names, values)
        holder.close()
        return {"identity": identity}

    def _list(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(names, values)
        return {"identity": identity, "leases": [_row(lease) for lease in holder.leases()]}

    def _look(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(names, values)
        return {"identity": identity, "lease": _row(holder.look(values["lease"], values["replay"]))}

    def _lease(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        """Lease, or return the lease that an earlier try of the same request took: an open one with
        this parent, that is newer than the newest that the client knew."""
        holder, identity = self._holder(names, values)
        parent = values["parent"]
        known = parent if values["after"] is None else values["after"]
        found = next(
            (each for each in holder.leases() if each.parent == parent and each.id > known), None
        )
        if found is None:
            found = holder.lease(values["n"], values["max_bytes"], values["parts"], parent)
        return {"identity": identity, "lease": None if found is None else _row(found)}

    def _finish(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(names, values)
        return {"identity": identity, "messages": holder.finish_lease(values["through"])}

    def _return(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        holder, identity = self._holder(names, values)
        return {"identity": identity, "messages": holder.return_lease(values["lease"])}

    def _wait(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        """Whether there may be something to lease now; the session asks again."""
        holder, identity = self._holder(names, values)
        return {"identity": identity, "ready": holder.wait(0)}

    # ---- staged rows ----

    def _stage(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        self._create_topic(names[0])
        size = self._staged.stage(names[0], values, rows)
        return {"memory": self._broker.identity, "size": size}

    def _commit(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        self._create_topic(names[0])
        published, done = self._staged.commit(names[0], values)
        return {"memory": self._broker.identity, "published": published, "done": done}

    def _abandon(self, names: _Names, values: Values, rows: bytes) -> _Answer:
        self._staged.abandon(names[0], values)
        return {"memory": self._broker.identity}


_COUNTS: Final = tuple(each.name for each in dataclasses.fields(ChannelCounts))

_CALLS: Final[dict[bytes, Callable[[LeaseDesk, _Names, Values, bytes], _Answer]]] = {
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


def _plain(value: Any) -> bool | int | float | None:
    """A count as JSON has it; numpy's numbers it does not."""
    if value is None or isinstance(value, bool | float):
        return value
    return int(value)


def _row(lease: Lease) -> list[int]:
    return list(dataclasses.astuple(lease))
