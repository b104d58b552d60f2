"""Results of Dramatiq's messages."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Final

from dramatiq.encoder import Encoder
from dramatiq.results import ResultBackend as Base
from dramatiq.results import ResultMissing, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT, Missing
from dramatiq.results.result import wrap_exception

import shmq
from shmq.integrations.link import Link

_log = logging.getLogger(__name__)

_KEY_BYTES: Final = 255
_SHORTEST_TTL: Final = 0.001
#: Characters of an exception's text that are kept if it can never fit.
_TEXT: Final = 200


class ResultBackend(Base):
    """A results store of shmq for Dramatiq's middleware `Results`.

    instance, owner, timeout: as in `Broker`. namespace, encoder, use_namespace_prefix_keys: as in
    Dramatiq's backends. store: the name of the results store. max_keys, max_bytes: its limits when
    it is made; None: a million keys and 64 MiB.

    A call that waits for a result sleeps until it is there, and polls nothing. A result that can
    never fit is stored as a failure, so that `get_result` raises ResultFailure with the limit.
    Raises shmq's Full if the store has no room, and NotRunning if no instance runs.
    """

    def __init__(
        self,
        instance: str | shmq.Broker | None = None,
        *,
        namespace: str = "dramatiq-results",
        encoder: Encoder | None = None,
        use_namespace_prefix_keys: bool = False,
        store: str = "dramatiq-results",
        max_keys: int | None = None,
        max_bytes: int | None = None,
        owner: str | int | None = None,
        timeout: float = 10.0,
    ) -> None:
        super().__init__(
            namespace=namespace,
            encoder=encoder,
            use_namespace_prefix_keys=use_namespace_prefix_keys,
        )
        self._link = Link(instance, owner, timeout)
        self._where = store, max_keys, max_bytes

    @property
    def store(self) -> shmq.Results:
        """The results store."""
        return self._link.store(*self._where)

    def build_message_key(self, message: Any) -> str:
        """The key of a message's result. A key that is too long for the store is its hash."""
        key = str(super().build_message_key(message))
        if len(key.encode()) <= _KEY_BYTES:
            return key
        return hashlib.sha256(key.encode()).hexdigest()

    def get_result(self, message: Any, *, block: bool = False, timeout: int | None = None) -> Any:
        """The result of a message.

        block: wait until it is there, for `timeout` milliseconds; None: 10 s. Raises ResultMissing
        or, after the time, ResultTimeout, and ResultFailure if the message failed.
        """
        key = self.build_message_key(message)
        if not block:
            result = self._get(key)
            if result is Missing:
                raise ResultMissing(message)
            return self.unwrap_result(result)
        seconds = (DEFAULT_TIMEOUT if timeout is None else timeout) / 1e3
        found = self._link.retried(lambda: self.store.wait(key, seconds))
        if found is None:
            raise ResultTimeout(message)
        return self.unwrap_result(self.encoder.decode(found))

    def _get(self, message_key: str) -> Any:
        found = self._link.retried(lambda: self.store.get(message_key))
        return Missing if found is None else self.encoder.decode(found)

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        value, seconds = self.encoder.encode(result), max(ttl / 1e3, _SHORTEST_TTL)
        try:
            self._link.retried(lambda: self.store.set(message_key, value, seconds))
        except shmq.MessageTooBig as exc:
            # Nobody would ever hear of a result that is not stored.
            _log.error("the result of %s is stored as a failure: %s", message_key, exc)
            failure = self.encoder.encode(_failure(exc, result))
            self._link.retried(lambda: self.store.set(message_key, failure, seconds))

    def close(self) -> None:
        """Detach from the instance. The next use attaches again."""
        self._link.close()


def _failure(exc: shmq.MessageTooBig, result: Any) -> Any:
    """The text that takes the place of a result, or of an exception, that can never fit."""
    match result:
        case {"__t": str(), "exn": {"msg": str(text)} as raised}:
            return {**result, "exn": {**raised, "msg": f"{text[:_TEXT]}... ({exc})"}}
    return wrap_exception(exc)
