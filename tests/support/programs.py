"""Programs that the tests start: those of Debian's minimum, those that `tools/prepare.sh` installs,
and those whose tests are skipped without them.

A machine on which the tests are written has more. So a hook looks at each program that a test
starts, and refuses one that a fresh machine might lack.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from support.external_programs import REMEDIES
from support.processes import ROOT

#: In bash, coreutils, dash, findutils, mount, sed, tar, util-linux, dpkg, apt: Debian has them.
#: The compiler is there too, for without one there is no extension to test.
_MINIMUM_WORDS: Final = """
    apt-get bash cat cc chmod chown cp dd df dpkg dpkg-deb echo env false find findmnt flock gcc
    grep head id ionice ln ls mkdir mkfifo mknod mount mv nice nohup nsenter prlimit rm sed setarch
    setpriv setsid sh sleep stat stdbuf su tail tar taskset tee test timeout touch true truncate
    umount uname unshare wc
"""
MINIMUM: Final = frozenset(_MINIMUM_WORDS.split())
#: The further words of these programs are a command.
_WRAPPER_WORDS: Final = """
    env nice nohup nsenter prlimit setarch setpriv setsid stdbuf taskset timeout unshare
"""
_WRAPPERS: Final = frozenset(_WRAPPER_WORDS.split())
_EVENTS: Final = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn"})
_PREPARE: Final = ROOT / "tools" / "prepare.sh"
_CALLERS: Final = (f"{ROOT / 'tests'}/", f"{ROOT / 'tools'}/")


@functools.cache
def installed() -> dict[str, str]:
    """The programs that `tools/prepare.sh` installs for the tests, and their packages."""
    table = re.search(r"^programs='\n(.*?)'$", _PREPARE.read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None, f"{_PREPARE} has no table of programs"
    return dict(line.split() for line in table[1].splitlines())  # type: ignore[misc]


def unlisted(words: Sequence[str]) -> str | None:
    """The program of a command that a fresh machine may lack; None if there is none."""
    known = MINIMUM | REMEDIES.keys() | installed().keys()
    return next((name for name in _programs(words) if name not in known), None)


def _programs(words: Sequence[str]) -> Iterator[str]:
    """The names of the programs that a command starts, as far as its words show them."""
    for at, word in enumerate(words):
        name = os.path.basename(word)
        if at and (word.startswith("-") or "=" in word or word.isdigit() or not shutil.which(word)):
            continue  # an option of the wrapper before it
        if _is_of_the_system(word):
            yield name
        if name not in _WRAPPERS:
            return


def _is_of_the_system(word: str) -> bool:
    """Whether it is neither of `.venv`, nor was built here, nor made by a test."""
    found = shutil.which(word)
    return found is not None and found.startswith(("/bin/", "/sbin/", "/usr/"))


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    words = arguments[1]
    if not isinstance(words, list | tuple) or not words or not _is_a_test():
        return
    name = unlisted([os.fsdecode(word) for word in words])
    if name is not None:
        raise AssertionError(
            f"{name} is not on every machine: add it to `programs` of {_PREPARE.name}, or ask "
            "for it with external_programs.peer"
        )


def _is_a_test() -> bool:
    """Whether the code that starts a program is the tests', and not a library's."""
    frame = sys._getframe(2)
    library = os.path.dirname(os.__file__)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((library, "<")) or f"{Path(library).name}/site-packages" in file:
            return file.startswith(_CALLERS)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def watch() -> None:
    """Look at each program that the tests of this process start."""
    installed()  # read before a test may use up the descriptors
    sys.addaudithook(_hook)
