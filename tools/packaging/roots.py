"""Installs a wheel in fresh root file systems of Debian and lets two processes exchange messages
there, by tools/packaging/pair.py; `tools/dev roots` calls it, as root.

mmdebstrap makes a root from the mirror that apt is configured with: the smallest set of packages
and a Python. It stays in a cache. A run sees it without a network, with /tmp and /dev/shm of its
own, in namespaces that end with it. The packages that shmq needs are downloaded outside. A root has
a compiler only if one of these has no wheel for its Python.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import wheels

#: A shell program in the root. $1: its Python; $2: empty if no compiler may be there.
INSTALL = """
set -eu
[ -n "$2" ] || for program in cc gcc clang tcc; do
    ! command -v "$program" || { echo "this root has a compiler" >&2; exit 1; }
done
"$1" -m venv /tmp/venv
/tmp/venv/bin/pip install --quiet --no-cache-dir --no-index --find-links /mnt/wheels shmq
cd /tmp
exec /tmp/venv/bin/python /mnt/pair.py
"""
#: A shell program in NAMESPACES. $1: the root; $2: the folder for its /mnt; then the command in it.
ENTER = """
set -eu
root=$1
mount --make-rprivate /
mount --bind "$2" "$root/mnt"
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
shift 2
exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"
"""
NAMESPACES = ("--mount", "--pid", "--ipc", "--net", "--fork", "--kill-child")


@dataclass(frozen=True)
class Root:
    """A release of Debian and its Python. from_source: what has no wheel for that Python."""

    suite: str
    python: str
    from_source: tuple[str, ...] = ()

    @property
    def packages(self) -> list[str]:
        names = [f"python{self.python}", f"python{self.python}-venv"]
        if self.from_source:
            names += ["gcc", "libc6-dev", f"libpython{self.python}-dev"]
        return names


ROOTS = (
    Root("bookworm", "3.11"),
    Root("trixie", "3.13"),
    Root("forky", "3.14", from_source=("posix_ipc",)),
)


def lacking() -> str:
    """The reason why this machine makes no root; empty if it does."""
    missing = [name for name in ("mmdebstrap", "apt-get", "unshare") if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid():
        return "needs root, for mounts"
    if subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True).returncode:
        return "needs leave to make namespaces"
    return ""


def mirror() -> str:
    """The address of Debian's packages in the configuration of apt."""
    words = ("apt-get", "indextargets", "--format", "$(REPO_URI)")
    which = ("Created-By: Packages", "Origin: Debian", "Label: Debian")
    done = subprocess.run([*words, *which], capture_output=True, text=True)
    found = done.stdout.split()
    if not found:
        raise SystemExit("roots: apt is configured with no mirror of Debian, or needs an update")
    return found[0]


def place(root: Root) -> Path:
    """The file system of a root, if it was made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shmq", "roots")
    return cache / f"{root.suite}-{root.python}"


def made(root: Root) -> Path:
    """The file system of a root, made unless the cache has it."""
    path = place(root)
    if path.is_dir():
        return path
    cache = path.parent
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=f".{root.suite}-"))
    try:
        wheels.run(
            # its mounts end with it, whatever happens, so that no rmtree meets them
            *("unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase"),
            # a mirror may be the frozen copy of one day
            '--aptopt=Acquire::Check-Valid-Until "false"',
            f"--include={','.join(root.packages)}",
            *(root.suite, unfinished / "root", mirror()),
        )
        (unfinished / "root").rename(path)
    finally:
        shutil.rmtree(unfinished)
    return path


def tags(machine: str) -> Iterator[str]:
    """pip's words for the systems of manylinux, the newest first."""
    for minor in range(28, 4, -1):
        yield f"--platform=manylinux_2_{minor}_{machine}"
    for name in ("manylinux2014", "manylinux2010", "manylinux1"):
        yield f"--platform={name}_{machine}"


def dependencies() -> list[str]:
    """The packages that shmq itself needs, as pip names them."""
    with (wheels.TOP / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["project"]["dependencies"])


def download(root: Root, wheel: Path, into: Path) -> None:
    """The wheel and the packages that it needs, for the root's Python."""
    pip = (sys.executable, "-m", "pip", "download", "-q", "--dest", into)
    for_root = ("--only-binary=:all:", f"--python-version={root.python}", *tags(platform.machine()))
    if root.from_source:
        wheels.run(*pip, "--no-deps", "--no-binary=:all:", *root.from_source)
        wheels.run(*pip, *for_root, "setuptools")
        needed = [word for word in dependencies() if not word.startswith(root.from_source)]
        wheels.run(*pip, *for_root, *needed)
        shutil.copy(wheel, into)
    else:
        wheels.run(*pip, *for_root, wheel)


def attempt(root: Root, wheel: Path) -> None:
    """Install the wheel in a root and run the pair of processes; ends this program if they fail."""
    path = made(root)
    with tempfile.TemporaryDirectory() as folder:
        download(root, wheel, Path(folder, "wheels"))
        shutil.copy(wheels.PAIR, folder)
        compiler = "compiler" if root.from_source else ""
        inside = ("/bin/sh", "-c", INSTALL, "sh", f"python{root.python}", compiler)
        wheels.run("unshare", *NAMESPACES, "sh", "-c", ENTER, "sh", path, folder, *inside)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/dev roots", description=__doc__)
    names = [root.suite for root in ROOTS]
    parser.add_argument("suite", nargs="*", help=f"only these of {', '.join(names)}")
    parser.add_argument("--wheel", type=Path, help="[that in build/wheels for glibc]")
    chosen = parser.parse_args()
    if strange := set(chosen.suite) - set(names):
        parser.error(f"{', '.join(sorted(strange))}: known are {', '.join(names)}")
    if reason := lacking():
        raise SystemExit(f"roots: this {reason}")
    found = sorted(wheels.OUT.glob(f"shmq-*-manylinux_*_{platform.machine()}.whl"))
    wheel = chosen.wheel or (found[0] if found else None)
    if wheel is None:
        raise SystemExit("roots: build/wheels has no wheel for this; `tools/dev wheels` makes it")
    for root in ROOTS:
        if root.suite in (chosen.suite or names):
            print(f"{root.suite}, Python {root.python}: {wheel.name}", flush=True)
            attempt(root, wheel)


if __name__ == "__main__":
    main()
