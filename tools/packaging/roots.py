"""Installs a wheel in fresh root file systems of Debian and lets two processes exchange messages
there, by tools/packaging/pair.py; `tools/dev roots` calls it, as root.

mmdebstrap makes a root from the mirror that apt is configured with: the smallest set of packages
and a Python. It stays in a cache. A run sees it without a network, with /tmp and /dev/shm of its
own, in namespaces that end with it. The packages that shmq needs are downloaded outside. A root has
a compiler only if one of these has no wheel for its Python. Debian has no Python without the GIL,
so that is compiled in its root, from Debian's source, which takes minutes.
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

import headers
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
#: A shell program in the root. $1: the archive with the source of Python, in /mnt.
COMPILE = """
set -eu
mkdir /tmp/source
cd /tmp/source
tar -xf "/mnt/$1" --strip-components=1
./configure -q --disable-gil --disable-test-modules OPT=-O1
nice make -s -j"$(nproc)"
make -s install
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
    """A release of Debian and its Python. from_source: what has no wheel for that Python.
    without_gil: a Python of that version which is compiled without the GIL."""

    suite: str
    python: str
    from_source: tuple[str, ...] = ()
    without_gil: bool = False

    @property
    def name(self) -> str:
        return f"{self.suite}-{self.python}t" if self.without_gil else self.suite

    @property
    def program(self) -> str:
        name = f"python{self.python}"
        return f"/usr/local/bin/{name}t" if self.without_gil else name

    @property
    def packages(self) -> list[str]:
        compiler = ["gcc", "libc6-dev"]
        if self.without_gil:
            return [*compiler, "make", "xz-utils", "libffi-dev", "libssl-dev", "zlib1g-dev"]
        names = [f"python{self.python}", f"python{self.python}-venv"]
        if self.from_source:
            names += [*compiler, f"libpython{self.python}-dev"]
        return names

    def takes(self, wheel: Path) -> bool:
        """Whether a wheel is for this Python, and this machine."""
        targets = [target for target in wheels.TARGETS if target.runs_here]
        python = self.python if self.without_gil else ""
        return any(target.names(wheel) for target in targets if target.python == python)


ROOTS = (
    Root("bookworm", "3.11"),
    Root("trixie", "3.13"),
    Root("forky", "3.14", from_source=("posix_ipc",)),
    Root("trixie", "3.13", from_source=("posix_ipc",), without_gil=True),
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


def place(root: Root) -> Path:
    """The file system of a root, if it was made."""
    return headers.cache() / "roots" / f"{root.suite}-{root.program.rpartition('python')[2]}"


def made(root: Root) -> Path:
    """The file system of a root, made unless the cache has it."""
    path = place(root)
    if path.is_dir():
        return path
    cache = path.parent
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=f".{root.suite}-"))
    try:
        source = unfinished / "source"
        source.mkdir()
        if root.without_gil:  # first, since a mirror may lack it
            archive = headers.source_of(f"python{root.python}", root.suite, source)
        wheels.run(
            # its mounts end with it, whatever happens, so that no rmtree meets them
            *("unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase"),
            # a mirror may be the frozen copy of one day
            '--aptopt=Acquire::Check-Valid-Until "false"',
            f"--include={','.join(root.packages)}",
            *(root.suite, unfinished / "root", headers.mirror()),
        )
        if root.without_gil:
            enter(unfinished / "root", source, COMPILE, archive.name)
        (unfinished / "root").rename(path)
    finally:
        shutil.rmtree(unfinished)
    return path


def enter(path: Path, folder: Path, program: str, *words: str) -> None:
    """Run a shell program in a root, with a folder as its /mnt; ends this program if it fails."""
    inside = ("/bin/sh", "-c", program, "sh", *words)
    wheels.run("unshare", *NAMESPACES, "sh", "-c", ENTER, "sh", path, folder, *inside)


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
    for_root = ["--only-binary=:all:", f"--python-version={root.python}", *tags(platform.machine())]
    if root.without_gil:
        for_root.append(f"--abi=cp{root.python.replace('.', '')}t")
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
        enter(path, Path(folder), INSTALL, root.program, "compiler" if root.from_source else "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/dev roots", description=__doc__)
    names = [root.name for root in ROOTS]
    parser.add_argument("root", nargs="*", help=f"only these of {', '.join(names)}")
    parser.add_argument("--wheel", type=Path, help="[those in build/wheels for glibc]")
    chosen = parser.parse_args()
    if strange := set(chosen.root) - set(names):
        parser.error(f"{', '.join(sorted(strange))}: known are {', '.join(names)}")
    if reason := lacking():
        raise SystemExit(f"roots: this {reason}")
    candidates = [chosen.wheel] if chosen.wheel else sorted(wheels.OUT.glob("*.whl"))
    if chosen.wheel:
        names = [root.name for root in ROOTS if root.takes(chosen.wheel)]
    for root in ROOTS:
        if root.name not in (chosen.root or names):
            continue
        wheel = next(filter(root.takes, candidates), None)
        if wheel is None:
            raise SystemExit(f"roots: no wheel for {root.name}; `tools/dev wheels` makes them")
        print(f"{root.name}, {root.program}: {wheel.name}", flush=True)
        try:
            attempt(root, wheel)
        except headers.Unavailable as exc:
            raise SystemExit(f"roots: {exc}") from None


if __name__ == "__main__":
    main()
