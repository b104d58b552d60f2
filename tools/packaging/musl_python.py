"""Compiles a CPython that is linked with musl, and lets two processes exchange messages with it, by
tools/packaging/pair.py; `tools/dev musl-python` calls it, as root.

Debian has musl, and the sources of CPython and zlib. Zig compiles these for musl, for this machine
or another one. The Python, musl and a static busybox are all that a root file system has: there is
no glibc in it. It stays in the cache of `tools/dev roots`; to make it takes minutes. This Python
has no ssl, no ctypes and no other module that needs a library beside zlib.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import headers
import roots
import wheels

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # as Debian names them
#: Its Python compiles what the same version of Python needs, of any machine and C library.
RELEASE = next(root for root in roots.ROOTS if root.suite == "trixie" and not root.from_source)
PYTHON = f"python{RELEASE.python}"
#: A shell program. $1: the machine; $2: the source of zlib; $3: that of CPython; $4: a Python of
#: the same version that runs here; $5: the root. CC and AR are those for the machine.
COMPILE = """
set -eu
host=$1-linux-musl
libraries=$PWD/libraries
cd "$2"
CHOST=$host CFLAGS=-O2 ./configure --static --prefix="$libraries"
make -j2 libz.a
make install
cd "$3"
# it does not know musl by the headers of Zig
printf '#undef linux\\nPLATFORM_TRIPLET=%s\\n' "$host" >Misc/platform_triplet.c
PKG_CONFIG_LIBDIR=$libraries/lib/pkgconfig OPT='-DNDEBUG -O1' CFLAGS=-Wno-date-time \\
    ./configure --build="$(uname -m)-pc-linux-gnu" --host="$host" --with-build-python="$4" \\
    --prefix=/usr --without-ensurepip --disable-test-modules \\
    ac_cv_file__dev_ptmx=yes ac_cv_file__dev_ptc=no ac_cv_buggy_getaddrinfo=no
make -j"$(($(nproc) * 2))"
make install DESTDIR="$5" PYTHON_FOR_BUILD=true  # it would compile all modules three times
"""
#: A program for the Python of Debian's root, where this machine's own is another one.
HERE = """#!/bin/sh
root={root}
library=$(echo "$root"/usr/lib/*-linux-gnu)
loader=$(echo "$library"/ld-linux-*.so.*)
PYTHONHOME=$root/usr exec "$loader" --library-path "$library" "$root/usr/bin/{python}" "$@"
"""
#: Modules of Python that no run needs.
UNUSED = ("idlelib", "tkinter", "turtledemo", "ensurepip", "pydoc_data", "test", "config-*")


def place(machine: str) -> Path:
    """The root of a machine, if it was made."""
    return roots.place(RELEASE).with_name(f"musl-{RELEASE.python}-{machine}")


def lacking() -> str:
    """The reason why this machine compiles no Python and no root; empty if it does."""
    missing = [name for name in ("make", "pkg-config") if not shutil.which(name)]
    return f"needs {', '.join(missing)}" if missing else roots.lacking()


def extract(machine: str, packages: Sequence[str], into: Path, hooks: Sequence[str] = ()) -> None:
    """The files of Debian's packages for a machine, in the folder `into`. No program of theirs is
    run. hooks: shell commands that see APT_CONFIG for the release."""
    try:
        mirror = headers.mirror()
    except headers.Unavailable as exc:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {exc}") from None
    wheels.run(
        *("unshare", "--mount", "mmdebstrap", "--quiet", "--variant=extract"),
        '--aptopt=Acquire::Check-Valid-Until "false"',
        f"--architectures={ARCHITECTURES[machine]}",
        f"--include={','.join(packages)}",
        *(f"--extract-hook=export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG; {hook}" for hook in hooks),
        *(RELEASE.suite, into),
        *(f"{kind} {mirror} {RELEASE.suite} main" for kind in ("deb", "deb-src")),
    )
    for name in ("bin", "sbin", "lib"):
        if not (into / name).exists():
            (into / name).symlink_to(f"usr/{name}")
    for name in ("dev", "mnt", "proc", "root", "sys", "tmp"):
        (into / name).mkdir(exist_ok=True)
    for name in ("sh", "env"):
        if not (into / "usr" / "bin" / name).exists():
            (into / "usr" / "bin" / name).symlink_to("busybox")
    for name in ("doc", "man", "locale"):
        shutil.rmtree(into / "usr" / "share" / name, ignore_errors=True)


def python_here(folder: Path) -> Path:
    """A program, written to `folder`, that runs the Python of Debian's root on this machine."""
    program = folder / f"{PYTHON}-here"
    program.write_text(HERE.format(root=roots.made(RELEASE), python=PYTHON))
    program.chmod(0o755)
    return program


def precompile(folder: Path) -> None:
    """Compile the modules in a folder, which a slow machine will import."""
    for name in UNUSED:
        for path in folder.glob(name):
            shutil.rmtree(path)
    with tempfile.TemporaryDirectory() as mine:
        words = ("-m", "compileall", "-q", "--invalidation-mode=unchecked-hash")
        wheels.run(python_here(Path(mine)), *words, folder)


def made(machine: str) -> Path:
    """The root of a machine with musl's Python, made unless the cache has it."""
    path = place(machine)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".musl-") as name:
        folder = Path(name)
        root = folder / "root"
        sources = f"apt-get -qq source --download-only --tar-only {PYTHON} zlib"
        extract(machine, ("musl", "busybox-static"), root, [f"cd {folder} && {sources}"])
        compile_into(root, machine, folder)
        precompile(root / "usr" / "lib" / PYTHON)
        root.rename(path)
    return path


def compile_into(root: Path, machine: str, folder: Path) -> None:
    """Compile zlib and CPython, whose sources are in `folder`, and install them in the root. The
    log is shown if that fails."""
    (target,) = (t for t in wheels.TARGETS if t.name == f"{machine}-linux-musl")
    tools = wheels.compiler(target)
    for name in ("zlib", PYTHON):
        (folder / name).mkdir()
        archive = next(folder.glob(f"{name}_*.orig.tar.[gx]z"))
        wheels.run("tar", "-xf", archive, "-C", folder / name, "--strip-components=1")
    words = (machine, folder / "zlib", folder / PYTHON, python_here(folder), root)
    log = folder / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            ["sh", "-c", COMPILE, "sh", *map(str, words)],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **wheels.compiling(target),
                "CC": f"{tools / 'cc'} -dynamic",
                **{name.upper(): str(tools / name) for name in ("ar", "ranlib")},
            },
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        raise SystemExit("\n".join([*lines[-40:], f"musl-python: exit status {done.returncode}"]))


def tags(machine: str) -> Iterator[str]:
    """pip's words for the systems of musllinux."""
    for minor in (2, 1):
        yield f"--platform=musllinux_1_{minor}_{machine}"


def unpack(wheel: Path, systems: Iterator[str], into: Path, also: Sequence[str] = ()) -> None:
    """The wheel, the packages that it needs and those in `also`, as a folder for PYTHONPATH.
    systems: pip's words for them."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", into)
    only = ("--only-binary=:all:", f"--python-version={RELEASE.python}", *systems)
    wheels.run(*pip, *only, wheel, *also)
    precompile(into)


def attempt(wheel: Path, words: Sequence[str] = (PYTHON, "/mnt/pair.py")) -> None:
    """Run a command, that with the pair of processes unless told otherwise, in the root for this
    machine; ends this program if it fails."""
    path = made(platform.machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(wheel, tags(platform.machine()), folder / "site")
        shutil.copy(wheels.PAIR, folder)
        inside = ("PYTHONPATH=/mnt/site", *words)
        wheels.run(
            *("unshare", *roots.NAMESPACES, "sh", "-c", roots.ENTER, "sh", path, folder, *inside)
        )


def wheel_for(family: str, machine: str) -> Path:
    """The wheel in build/wheels of a family of systems; ends this program if there is none."""
    found = sorted(wheels.OUT.glob(f"shmq-*-abi3-{family}_*_{machine}.whl"))
    if not found:
        raise SystemExit("build/wheels has no wheel for this; `tools/dev wheels` makes it")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/dev musl-python", description=__doc__)
    parser.add_argument("--wheel", type=Path, help="[that in build/wheels for musl]")
    parser.add_argument(
        "--only-make",
        choices=ARCHITECTURES,
        help="make the root of a machine, and run nothing",
    )
    chosen = parser.parse_args()
    if reason := lacking():
        raise SystemExit(f"musl-python: this {reason}")
    if chosen.only_make:
        print(made(chosen.only_make))
        return
    wheel = chosen.wheel or wheel_for("musllinux", platform.machine())
    print(f"musl, {PYTHON}: {wheel.name}", flush=True)
    attempt(wheel)


if __name__ == "__main__":
    main()
