"""`tools/dev ends [ROW...] [--ends END...] [--share S] [--seed S]`: the machine in a /dev/shm and a
directory of its own. It prints a line of JSON for each finding, and ends with 1 if there is one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: So that what is left there was left by its processes.
_OWN = (
    'mount -t tmpfs -o size=512m tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs $0 && exec "$@"'
)


def command(directory: Path, words: Sequence[str]) -> list[str]:
    """The command of the machine, with these words."""
    own = ["unshare", "-Urm", "sh", "-c", _OWN, str(directory)]
    return [*own, sys.executable, "-m", "lifecycle.machine", str(directory), *words]


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        words = command(Path(directory), sys.argv[1:])
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as machine:
            assert machine.stdout is not None
            lines = []
            for line in machine.stdout:
                print(line, end="", flush=True)
                lines.append(line)
    return int(machine.returncode != 0 or len(lines) > 1)


if __name__ == "__main__":
    sys.exit(main())
