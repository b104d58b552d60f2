"""Programs that tests run beside shmq: other brokers' and the system's.

One that is missing fails its test where SHMQ_REQUIRE_PEERS is 1 (CI), and skips it elsewhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from support.processes import ROOT

BIN = ROOT / "build" / "peers" / "bin"  # where tools/peers installs

# what else installs a program
REMEDIES = {
    "chromium-headless-shell": "install Debian's chromium-headless-shell",
    "java": "tools/dev test installs it",
    "kafka-server": "tools/dev test tests/forward installs it, with Maven and Java 17 or newer",
    "nats-server": "tools/dev test tests/forward installs it, with Go 1.26 or newer",
    "systemd-analyze": "install Debian's systemd",
    "systemd-sysusers": "install Debian's systemd",
    "systemd-tmpfiles": "install Debian's systemd",
    "prometheus": "tools/dev test tests/monitoring unpacks Debian's",
    "redis-server": "tools/dev test tests/differ installs it for Python 3.11 and 3.12; for later "
    "ones install Debian's redis-server",
    "promtool": "tools/dev test tests/monitoring unpacks Debian's",
    "openssl": "install Debian's openssl",
    "unshare": "install Debian's util-linux",
    "tmux": "install Debian's tmux",
}


def found(name: str) -> str | None:
    """The path of a program, None if it is missing."""
    scripts = Path(sys.prefix) / "bin"  # programs that Python packages bring
    return shutil.which(name, path=BIN) or shutil.which(name) or shutil.which(name, path=scripts)


def peer(name: str) -> str:
    """The path of a program."""
    return found(name) or missing(name, REMEDIES.get(name, "tools/dev peers installs it"))


def missing(what: str, remedy: str) -> NoReturn:
    """End the test for the lack of something."""
    end = pytest.fail if os.environ.get("SHMQ_REQUIRE_PEERS") == "1" else pytest.skip
    end(f"{what} is missing: {remedy}")
