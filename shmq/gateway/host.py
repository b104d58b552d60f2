"""The interfaces of a session: to its process, and to the parts that execute its commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shmq.gateway.acts import Allows
from shmq.gateway.identify import Settings
from shmq.gateway.protocol import ProtocolError
from shmq.options import Options
from shmq.users import Known, Quota

#: Of a client whom the access file does not name.
NO_QUOTA: Final = Quota()

After = Callable[[Any, BaseException | None], None]

#: Sends pieces of frames and returns what the client did not take; it is said when the job is done.
Send = Callable[[Sequence[bytes | memoryview]], bytes]

#: Reads the rest of a command from (session, data, start, end); returns where the input after it
#: begins, or `start` if the command is not complete.
Reader = Callable[[Any, bytearray, int, int], int]


@dataclass
class Job:
    """Work that may take long. call: runs in a thread; None: only wait for `seconds`.
    after: called in the session's thread with the result, or with the exception raised."""

    call: Callable[[], Any] | None
    after: After
    seconds: float = 0.0
    kind: str = "general"
    """Which pool of threads it runs in, of `pools.KINDS`. `login`, `password`: the job
    checks what a client shows."""
    proof: bytes = b""
    """The secret, for the brake on guessing. The result None says that it is wrong. Empty: it was
    right before."""
    user: str = ""
    """The user's name that `proof` is shown for, if there is one."""
    stream: Callable[[Send], Any] | None = None
    """As `call`, of a job that may send frames itself, if the driver can pass it `Send`."""


@dataclass(frozen=True)
class Grant:
    """The rights of a client, as an authorisation server or the access file has them."""

    identity: str
    identity_url: str
    count: int
    expires: float
    """When to ask again, of the event loop's time; infinity: never."""
    allows: Allows
    """The only question about a right: (act, topic, channel); see `acts`."""
    quota: Quota = NO_QUOTA
    known: Known | None = None
    """The user of the access file; None: an authorisation server granted this."""

    def is_named(self, secret: bytes) -> bool:
        """Whether a secret is the name of the user, whom something else has shown to be it."""
        proved = self.known is not None and self.known.proof.kind in ("certificate", "uid")
        return proved and secret == self.identity.encode()


class Client(Protocol):
    """The identity of a client, for its process."""

    address: str
    ip: str
    tls: Any
    uid: int | None
    """Of the process at the other end of a Unix socket; None: it is no Unix socket."""


class Host(Protocol):
    """The process, as its sessions see it; `context.Context` implements it."""

    options: Options
    producers: dict[bytes, Any]
    leases: Any
    """Answers the requests of the lease protocol: `lease_desk.LeaseDesk`."""

    @property
    def has_tls(self) -> bool:
        """Whether clients may ask for TLS."""

    @property
    def auth_enabled(self) -> bool:
        """Whether clients must send AUTH before they publish or subscribe."""

    def kind_of(self, topic: bytes) -> str:
        """The kind of a job that needs the topic: it may have to be created first."""

    def open_producer(self, topic: bytes) -> Any:
        """Add a producer to `producers`; create the topic if it is missing. May take long."""

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Any:
        """Return a consumer whose limit in flight is 0. May take long.

        Raises ProtocolError, Gone, ShmqError."""

    def query_auth(self, client: Client, secret: bytes) -> Grant | None:
        """Ask the authorisation servers, or the access file; return None if they refuse. May take
        long."""

    def greet(self, client: Client) -> Grant | None:
        """Return what a client may do who has sent no secret: by its certificate, by the uid of its
        process, or as everybody."""

    def turned_away(self, client: Client) -> None:
        """A client was refused because nothing has shown that it is a user: note it, if its
        certificate or its uid should have."""

    def needs_auth(self, wanted: Collection[str]) -> bool:
        """Whether a client whom nothing has shown to be a user must send AUTH. wanted: the layers
        that are added next; with TLS a certificate may follow."""

    def again(self, grant: Grant) -> Grant | None:
        """Return the same user's rights by the rules of now; None: nobody has that proof."""

    def enter(self, grant: Grant) -> str:
        """Count a connection of a user. Returns the reason to refuse it; then it is not counted."""

    def leave(self, grant: Grant) -> None:
        """A connection that was counted has ended, or is another user's."""

    def pause(self, grant: Grant) -> float:
        """Return the seconds until the user may publish; 0: now."""

    def spend(self, grant: Grant, messages: int) -> None:
        """Count messages that the user has published."""

    def no_room(self) -> str:
        """Return the reason why a full queue will stay full; empty if it may get room."""

    def is_in_flight(self, consumer: Any, message_id: bytes) -> bool:
        """Returns true if the message is in flight to any client of the consumer's channel."""


class Owner(Protocol):
    """The session, as its parts see it. It is passed to each call and the parts do not keep it, so
    there is no reference cycle that would outlive the connection."""

    address: str
    now: float
    need: int
    closing: bool
    flush: bool
    output: list[bytes]
    job: Job | None
    command: bytes
    reader: Reader | None
    settings: Settings

    @property
    def who(self) -> str:
        """The user's name, if the access file names one, else the address."""

    @property
    def known(self) -> bool:
        """Whether the client has proven that it is a user."""

    @property
    def origin(self) -> str:
        """Whose the client's holders, staged rows and topics are."""

    @property
    def quota(self) -> Quota:
        """The limits of the client's user."""

    def expect(self, command: bytes, reader: Reader) -> None:
        """Pass the following input to `reader` until it sets `reader` to None."""

    def say(self, data: bytes) -> None:
        """Send a frame to the client."""

    def fail(self, error: ProtocolError) -> None:
        """Send an error to the client and close."""

    def abort(self) -> None:
        """Close without a message to the client."""

    @property
    def may_run(self) -> bool:
        """Whether the next PUB to the same topic needs no question."""

    def pause(self) -> float:
        """Return the seconds until the client may publish, by its user's quota; 0: now."""

    def spend(self, messages: int) -> None:
        """Count messages that the client has published."""

    def authorised(self, command: bytes, topic: bytes, channel: bytes) -> bool:
        """Check the client's permission; raises ProtocolError if it has none. Returns false if the
        grant has expired: check again when the job that renews it is done."""
