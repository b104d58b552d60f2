"""The limit of open files (RLIMIT_NOFILE), and how many descriptors this process needs."""

from __future__ import annotations

import logging
import resource

from shmq._native import CONSTANTS

#: Files of queues in use (the spiller keeps those of 256 open, two each), sockets, pipes, locks.
OTHERS = 1024
#: The above, and a pidfd for each process that may be attached (see `reaper`).
NEEDED = CONSTANTS["CLIENTS"] + OTHERS

_log = logging.getLogger(__name__)


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, and log a hard limit that is too low.

    The soft limit is low only for the sake of programs that use select(2). nsqd's runtime does the
    same. The gateway's processes inherit the limit for their connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as exc:  # a filter of system calls may forbid it
            _log.warning("cannot raise RLIMIT_NOFILE from %d to %d: %s", soft, hard, exc)
            hard = soft
    if 0 <= hard < NEEDED:
        _log.warning(
            "RLIMIT_NOFILE is %d; with many processes attached and many queues on disk up to %d "
            "files are open: ulimit -Hn 65536 (systemd: LimitNOFILE=65536)",
            hard,
            NEEDED,
        )


def below(limit: int | None = None) -> int:
    """Optional descriptors must stay below this number, so that necessary ones find room above it.

    limit: the limit of open files (default: this process's soft limit).
    """
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NEEDED if limit < 0 else limit - min(OTHERS, limit // 2)
