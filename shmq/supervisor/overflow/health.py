"""The disk's health, as the spiller sees it."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from shmq.storage import remedies
from shmq.supervisor.trouble import DiskTrouble, probe

_PROBE_BYTES = 16 << 10  # as much as the smallest batch of a disk that is nearly full

_log = logging.getLogger(__name__)


class DiskHealth:
    """`text` is nsqd's: `OK`, or `NOK - ` and the disk's last error."""

    def __init__(self, data_path: Path, trouble: DiskTrouble) -> None:
        """trouble: where disk errors are published."""
        self._data_path = data_path
        self._trouble = trouble
        self.text = "OK"

    def failed(self, exc: OSError) -> None:
        """Note a disk error, and log it if it differs from the last one."""
        text = f"NOK - {exc.strerror or exc}"
        if text != self.text:
            _log.error("disk trouble: %s; trying again every second", remedies.sentence(exc))
        self.text = text
        self._trouble.met("spiller", exc)

    def works(self) -> None:
        """Note that the disk took a write."""
        if self.text != "OK":
            _log.info("the disk works again")
            self.text = "OK"
            self._trouble.over("spiller")

    def probe(self) -> None:
        """Probe a disk that failed. With no message left to write (consumers took them all), no
        write would show that the disk works again."""
        if self.text != "OK":
            with contextlib.suppress(OSError):
                probe(self._data_path, _PROBE_BYTES)
                self.works()
