"""Processes of other users. Only root can start them: by `setpriv`, or by a Python that
becomes one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from support import processes

SETPRIV = shutil.which("setpriv")
STRANGER, SERVICE, GROUP = 64301, 64302, 64310  # made up: ids need no accounts
#: For tests that need them.
needed = pytest.mark.skipif(
    os.geteuid() != 0 or SETPRIV is None, reason="only root, with setpriv, can be somebody else"
)
RUN = "from shmq.cli import main; sys.exit(main(sys.argv[1:]))"


def as_user(uid: int, *words: object, gid: int | None = None) -> None:
    """Run a command as another user."""
    command = ["setpriv", f"--reuid={uid}", f"--regid={gid or uid}", "--clear-groups"]
    subprocess.run([*command, "--", *map(str, words)], check=True)


def become(uid: int, gid: int | None = None) -> str:
    """Python that makes its process another user's. The code it will need may lie where that user
    cannot read, so it is imported before."""
    return (
        "import os, sys, importlib, pkgutil, psutil, shmq.cli, shmq.supervisor.supervisor\n"
        "for found in pkgutil.iter_modules(shmq.cli.__path__, 'shmq.cli.'):\n"
        "    importlib.import_module(found.name)\n"
        "import numpy.linalg, concurrent.futures.thread, encodings.idna\n"
        f"os.setgroups([]); os.setgid({gid or uid}); os.setuid({uid})\n"
    )


def run(*words: str, uid: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """A command of the command line, to its end; AssertionError if that does not come."""
    argv = [sys.executable, "-c", f"import sys\n{become(uid) if uid else ''}{RUN}", *words]
    environment = {**os.environ, **more}
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=processes.WATCHDOG * 2,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{words} hangs") from None


def turn_into(uid: int) -> None:
    """Have this process be another user's, who may read what root may: the interpreter may be in a
    directory that only root enters."""
    libc, read_search = ctypes.CDLL(None, use_errno=True), 2  # CAP_DAC_READ_SEARCH
    keep_caps, ambient, ambient_raise, version_3 = 8, 47, 2, 0x20080522

    def call(function: Any, *args: Any) -> None:
        if function(*args):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.prctl, keep_caps, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    kept = (ctypes.c_uint32 * 6)(*[1 << read_search] * 3)  # effective, permitted, inheritable
    call(libc.capset, (ctypes.c_uint32 * 2)(version_3, 0), kept)
    call(libc.prctl, ambient, ambient_raise, read_search, 0, 0)
