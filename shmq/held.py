"""The part of a broker's handle that ends what somebody else holds: messages in flight and leases.

An operator decides this, and no timer does: a process that is alive keeps what it holds until its
own time is over.
"""

from __future__ import annotations

import re

from shmq import arguments
from shmq.arguments import number, whole
from shmq.configurable import Configurable
from shmq.errors import BadArgument, NotInFlight
from shmq.option_types import to_ns

_ID = re.compile("[0-9a-fA-F]{16}")
_LONGEST = 1e9  # seconds, more than any max_req_timeout, to which the core lowers a delay


class Held(Configurable):
    """Messages and leases that any process holds, for a `Broker`."""

    # ---- messages ----

    def finish_message(self, topic: str, channel: str, id: str, pid: int | None = None) -> None:
        """Finish a message that is in flight to a consumer of any process. Its consumer's own
        `finish`, `requeue` and `touch` raise NotInFlight from then on, as after a time-out, and the
        consumer may take another message.

        id: as `Message.id` and `peek` have it. pid: do so only if this process holds it; None:
        whichever does. Two dead letters in one dead topic may have the same id; one of them is
        finished then.

        Raises NotInFlight if nobody holds the message any more, or not that process; Gone if there
        is no such channel; BadName; and BadArgument for an id that is none.
        """
        native, queue, serial = self._existing_queue(topic, channel)
        try:
            native.held_finish(queue, serial, *_message(id, pid))
        except NotInFlight:
            raise _not_held("finish", topic, channel, id, pid) from None

    def requeue_message(
        self, topic: str, channel: str, id: str, delay: float = 0, pid: int | None = None
    ) -> None:
        """Requeue a message that is in flight to a consumer of any process: it is handed out again,
        after those that are waiting now. This counts no failure of the message.

        delay: seconds before that, at most `max_req_timeout`. id, pid and what its consumer finds:
        as for `finish_message`. Raises as that, and ValueError for a delay that is none.
        """
        if not number("delay", delay) >= 0:  # not so for a NaN
            raise ValueError(f"delay must be 0 or more seconds, not {delay}")
        native, queue, serial = self._existing_queue(topic, channel)
        until = to_ns(min(delay, _LONGEST))
        try:
            native.held_requeue(queue, serial, *_message(id, pid), until)
        except NotInFlight:
            raise _not_held("requeue", topic, channel, id, pid) from None

    # ---- leases ----

    def finish_lease(self, topic: str, channel: str, lease: int) -> int:
        """Finish a lease, whoever holds it. Returns the number of its messages. Raises LeaseLost
        if there is no such lease, and Gone if there is no such channel."""
        id = arguments.lease("lease", lease)
        native, queue, serial = self._existing_queue(topic, channel)
        return native.lease_end(queue, serial, id, False)

    def return_lease(self, topic: str, channel: str, lease: int) -> int:
        """Return a lease, whoever holds it: its messages go to the head of the channel. Returns
        their number. Raises LeaseLost if there is no such lease, and Gone if there is no such
        channel."""
        id = arguments.lease("lease", lease)
        native, queue, serial = self._existing_queue(topic, channel)
        return native.lease_end(queue, serial, id, True)


def _message(id: str, pid: int | None) -> tuple[int, int]:
    """The numbers that the core takes for a message and its holder."""
    if not _ID.fullmatch(id):
        raise BadArgument(f"the id of a message has 16 hexadecimal digits, which {id!r} has not")
    if pid is None:
        return int(id, 16), 0
    if not 0 < whole("pid", pid) < 1 << 31:
        raise BadArgument(f"pid is the number of a process, or None, not {pid!r}")
    return int(id, 16), whole("pid", pid)


def _not_held(verb: str, topic: str, channel: str, id: str, pid: int | None) -> NotInFlight:
    who = "nobody holds it" if pid is None else f"process {pid} does not hold it"
    return NotInFlight(
        f"{verb} message {id} of {topic}/{channel}: {who}; it may have been finished, requeued or "
        f"timed out meanwhile (shmq peek {topic} {channel} --state in_flight)"
    )
