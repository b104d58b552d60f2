"""The disk's health, as the spiller sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Set
from pathlib import Path

from shmq.storage import remedies
from shmq.supervisor.registry import Queue
from shmq.supervisor.trouble import DiskTrouble, probe

_PROBE_BYTES = 16 << 10  # as much as the smallest batch of a disk that is nearly full

_log = logging.getLogger(__name__)


class DiskHealth:
    """`text` is nsqd's: `OK`, or `NOK - ` and the disk's last error."""

    def __init__(self, data_path: Path, trouble: DiskTrouble) -> None:
        """trouble: where disk errors are published."""
        self._data_path = data_path
        self._trouble = trouble
        self._failing: set[tuple[Queue, str]] = set()  # with a kind of work each
        self.text = "OK"

    def failed(self, queue: Queue, kind: str, exc: OSError) -> None:
        """Note that the disk refused this kind of work for a queue, and log the error if it differs
        from the last one."""
        self._failing.add((queue, kind))
        text = f"NOK - {exc.strerror or exc}"
        if text != self.text:
            _log.error("disk trouble: %s; trying again every second", remedies.sentence(exc))
        self.text = text
        self._trouble.met("spiller", exc)

    def works(self, queue: Queue, kind: str) -> None:
        """Note that the disk did this kind of work for a queue. It works again when it does for
        each queue that it failed: else it would fail and work again every second."""
        if self._failing:
            self._failing.discard((queue, kind))
            if not self._failing:
                self._is_well()

    def only(self, needing: Set[Queue]) -> None:
        """Forget the refusals of queues that need nothing of the disk any more."""
        if self._failing:
            self._failing = {key for key in self._failing if key[0] in needing}

    def _is_well(self) -> None:
        if self.text != "OK":
            _log.info("the disk works again")
            self.text = "OK"
            self._trouble.over("spiller")

    def probe(self) -> None:
        """Probe a disk that failed, if no queue needs what failed any more (consumers took all
        messages): no write would show that the disk works again."""
        if self.text != "OK" and not self._failing:
            with contextlib.suppress(OSError):
                probe(self._data_path, _PROBE_BYTES)
                self._is_well()
