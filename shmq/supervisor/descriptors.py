"""How many files this process may have open, and how many it needs."""

from __future__ import annotations

import logging
import resource

from shmq._native import CONSTANTS

#: Files of queues in use (`spill` keeps 256 of them open, two each), sockets, pipes, locks.
OTHERS = 1024
#: And one for each process that may be attached (`reaper`).
NEEDED = CONSTANTS["CLIENTS"] + OTHERS

_log = logging.getLogger(__name__)


def raise_limit() -> None:
    """Have as many as this user may: the soft limit is low only for programs that use select(2).
    As nsqd, whose runtime does it. The gateway's processes inherit it, for their connections. A
    hard limit that is too low is logged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as exc:  # a filter of system calls
            _log.warning("cannot raise RLIMIT_NOFILE from %d to %d: %s", soft, hard, exc)
            hard = soft
    if 0 <= hard < NEEDED:
        _log.warning(
            "RLIMIT_NOFILE is %d; with many processes attached and many queues on disk up to %d "
            "files are open: ulimit -Hn 65536 (systemd: LimitNOFILE=65536)", hard, NEEDED,
        )  # fmt: skip


def below(limit: int | None = None) -> int:
    """Descriptors that are only a convenience are to stay below this number: what must be opened
    finds room above it. limit: of files (default: this process's)."""
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NEEDED if limit < 0 else limit - min(OTHERS, limit // 2)
