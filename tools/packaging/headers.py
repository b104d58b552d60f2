"""The headers of Pythons without the GIL, which tools/packaging/wheels.py compiles with.

Debian has no such Python, but its packages of the usual one have the same headers: they are for
both, and read a macro, Py_GIL_DISABLED, that pyconfig.h has in a build without the GIL. So apt
downloads one package of each version from the mirror that it is configured with, and the headers
stay in a cache. Neither root nor an installation is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

#: The release of Debian that has each version of Python.
SUITES = {"3.13": "trixie", "3.14": "forky"}

_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Unavailable(Exception):
    """The headers cannot be had on this machine; says why."""


def mirror() -> str:
    """The address of Debian's packages in the configuration of apt. Raises Unavailable."""
    words = ("apt-get", "indextargets", "--format", "$(REPO_URI)")
    which = ("Created-By: Packages", "Origin: Debian", "Label: Debian")
    try:
        done = subprocess.run([*words, *which], capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable("this machine has no apt") from None
    found = done.stdout.split()
    if not found:
        raise Unavailable("apt is configured with no mirror of Debian, or needs an update")
    return found[0]


def cache() -> Path:
    """The folder that keeps what was made of Debian's packages."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shmq")


def headers(python: str) -> Path:
    """The folder with Python.h of a version, such as `3.13`, downloaded unless the cache has it.
    Raises Unavailable."""
    path = cache() / "headers" / python
    if path.is_dir():
        return path
    source = mirror()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{python}-") as name:
        folder = Path(name)
        package = f"libpython{python}-dev"
        _apt(package, SUITES[python], ("deb", ["download"]), source, folder)
        _unpack(package, folder)
        found = folder / "usr" / "include" / f"python{python}"
        (pyconfig,) = found.parent.glob(f"*/python{python}/pyconfig.h")
        shutil.copy(pyconfig, found)  # there it includes that of the machine
        try:
            found.rename(path)
        except OSError:
            if not path.is_dir():  # else another process was faster
                raise
    return path


def source_of(package: str, suite: str, folder: Path) -> Path:
    """Download the archive with the source of a package of a release. Raises Unavailable."""
    _apt(package, suite, ("deb-src", ["source", "--download-only"]), mirror(), folder)
    (archive,) = (file for file in folder.glob("*.orig.tar.*") if file.suffix != ".asc")
    return archive


def _apt(package: str, suite: str, how: tuple[str, list[str]], source: str, folder: Path) -> None:
    """Let apt download a package of a release into a folder, with lists that end with it. how: the
    type of the list, and the command. Raises Unavailable."""
    kind, command = how
    target = "Packages" if kind == "deb" else "Sources"
    options = [f"target={target}", *([f"signed-by={_KEYS}"] if _KEYS.is_file() else [])]
    (folder / "sources.list").write_text(f"{kind} [{' '.join(options)}] {source} {suite} main\n")
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": folder,
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::Archives": folder / "archives",
        "Acquire::Check-Valid-Until": "false",  # a mirror may be the frozen copy of one day
        "APT::Sandbox::User": "",  # it could not write here
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for words in (["update"], [*command, package]):
        done = subprocess.run([*apt, *words], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise Unavailable(f"{package} of Debian's {suite}: {said}")


def _unpack(package: str, folder: Path) -> None:
    """Unpack the downloaded package beside it."""
    (file,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", file, folder], check=True)
