"""Exit statuses of the commands."""

OK, ERROR, USAGE, NOT_RUNNING, DEGRADED, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

#: Exit status -> its meaning.
EXIT_CODES = {
    OK: "done",
    ERROR: "error, one sentence on stderr",
    USAGE: "usage",
    NOT_RUNNING: "the instance is not running, or no host answers",
    DEGRADED: "degraded: its supervisor is dead, its disk or /dev/shm is full or broken, a "
    "host does not answer, or `doctor` or `inspect` found something",
    REFUSED: "`forward` came to a message that the other side never takes, and stopped",
    INTERRUPTED: "Ctrl-C",
}
