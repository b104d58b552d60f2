"""The wheels for this machine, of both C libraries, one without the GIL, and the source
distribution: made by `tools/dev wheels`, with all of their files and no others; those of this C
library are installed and run where there is no compiler, also in the roots of Debian that
`tools/dev roots` left in its cache, and the core's C tests are run with the other one. Where
`tools/dev musl-python` and `tools/dev emulated` left files in the cache, the wheel for musl is run
too, and that for aarch64 on an emulated machine."""

from __future__ import annotations

import functools
import importlib.util
import io
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.processes import ROOT

HEADERS = ROOT / "tools" / "packaging" / "headers.py"
BUILDER = ROOT / "tools" / "packaging" / "wheels.py"
MUSL = ROOT / "tools" / "packaging" / "musl.py"
ROOTS = ROOT / "tools" / "packaging" / "roots.py"

pytestmark = pytest.mark.deep


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


headers = load(HEADERS)
wheels = load(BUILDER)
roots = load(ROOTS)
musl = load(MUSL)
musl_python = load(MUSL.with_name("musl_python.py"))
emulated = load(MUSL.with_name("emulated.py"))


#: One for each C library, and one without the GIL, which takes 20 s; `tools/dev wheels` makes all.
WITHOUT_GIL = ("gnu.2.28", "3.13")
HERE = [
    target
    for target in wheels.TARGETS
    if target.machine == platform.machine()
    and (not target.python or (target.libc, target.python) == WITHOUT_GIL)
]
RUN_HERE = [target for target in HERE if target.runs_here]


@functools.cache
def reason_without(python: str) -> str:
    """Why this machine makes no wheel for a version without the GIL; empty if it does."""
    try:
        headers.headers(python)
    except headers.Unavailable as exc:
        return str(exc)
    return ""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheels for this machine."""
    folder = tmp_path_factory.mktemp("wheels")
    possible = [target for target in HERE if not (target.python and reason_without(target.python))]
    targets = [f"--target={target.name}" for target in possible]
    command = [sys.executable, BUILDER, *targets, "--into", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(params=HERE, ids=lambda target: target.name)
def wheel(made: Path, request: pytest.FixtureRequest) -> Path:
    target = request.param
    if target.python and (reason := reason_without(target.python)):
        pytest.skip(f"no headers of Python {target.python}: {reason}")
    (path,) = (wheel for wheel in made.glob("*.whl") if target.names(wheel))
    return path


def tracked(*paths: str) -> set[str]:
    """The files that git has below these paths."""
    done = subprocess.run(
        ["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=True
    )
    return {name.decode() for name in done.stdout.split(b"\0") if name}


@pytest.mark.parametrize(
    ("wheel", "extension"),
    [pytest.param(target, target.extension, id=target.name) for target in HERE],
    indirect=["wheel"],
)
def test_a_wheel_has_the_files_of_its_packages_and_the_extension(
    wheel: Path, extension: str
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename for info in archive.infolist() if not info.is_dir()}
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - about == tracked("shmq", "pyspark_shmq") | {extension}
    assert {name.partition("/")[2] for name in about} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def needed_by(extension: bytes) -> set[str]:
    """The names that an extension takes from others."""
    from elftools.elf.elffile import ELFFile

    symbols = ELFFile(io.BytesIO(extension)).get_section_by_name(".dynsym").iter_symbols()
    return {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}


@pytest.mark.parametrize(
    ("wheel", "target"),
    [pytest.param(target, target, id=target.name) for target in HERE],
    indirect=["wheel"],
)
def test_a_wheel_says_which_python_it_is_for(wheel: Path, target: Any) -> None:
    python, abi = ("cp313", "cp313t") if target.python else ("cp311", "abi3")  # and later ones
    assert wheel.stem.split("-")[2:4] == [python, abi]
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(about).decode().splitlines()
        extension = archive.read(target.extension)
    said = [line for line in lines if line.startswith("Tag: ")]
    assert said
    assert all(line.startswith(f"Tag: {python}-{abi}-") for line in said)
    assert ("PyCriticalSection_Begin" in needed_by(extension)) == bool(target.python)


def test_the_source_distribution_has_what_git_has(made: Path) -> None:
    (path,) = made.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert names == tracked() | {"PKG-INFO"}


@pytest.mark.parametrize(
    ("wheel", "python", "unwheeled"),
    [
        pytest.param(target, python, wheels.UNWHEELED if target.python else (), id=python)
        for target in RUN_HERE
        for python in wheels.pythons(target)
    ],
    indirect=["wheel"],
)
def test_a_wheel_works_where_there_is_no_compiler(
    wheel: Path, python: str, unwheeled: tuple[str, ...]
) -> None:
    wheels.fresh(python, wheel, unwheeled)


@pytest.mark.parametrize(
    ("wheel", "root"),
    [
        pytest.param(target, root, id=root.name)
        for target in RUN_HERE
        for root in roots.ROOTS
        if (root.python if root.without_gil else "") == target.python
        and (root.without_gil or not root.from_source)
    ],
    indirect=["wheel"],
)
def test_a_wheel_works_in_a_fresh_root(wheel: Path, root: Any) -> None:
    if reason := roots.lacking():
        pytest.skip(f"this {reason}")
    if not roots.place(root).is_dir():
        pytest.skip(f"`tools/dev roots {root.name}` makes this root, which takes minutes")
    roots.attempt(root, wheel)


def test_the_core_passes_its_tests_with_musl() -> None:
    done = subprocess.run([sys.executable, MUSL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "wheel", [target for target in HERE if target.name.endswith("-linux-musl")], indirect=True
)
def test_a_wheel_works_where_there_is_no_glibc(wheel: Path) -> None:
    if reason := musl_python.lacking():
        pytest.skip(f"this {reason}")
    if not musl_python.place(platform.machine()).is_dir():
        pytest.skip("`tools/dev musl-python` compiles that Python, which takes minutes")
    musl_python.attempt(wheel)


@pytest.mark.parametrize("libc", list(emulated.FAMILIES))
def test_a_wheel_works_on_another_machine(libc: str, tmp_path: Path) -> None:
    if platform.machine() == emulated.MACHINE:
        pytest.skip(f"this machine is {emulated.MACHINE} itself")
    if reason := emulated.lacking():
        pytest.skip(f"this {reason}")
    if not all(emulated.place(name).is_dir() for name in ("gnu", libc)):
        pytest.skip(f"`tools/dev emulated {libc}` makes that machine's files, which takes minutes")
    name = f"{emulated.MACHINE}-linux-{libc}"
    target = next(t for t in wheels.TARGETS if t.name.startswith(name))
    (wheel,) = wheels.build([target], tmp_path / "wheels")
    emulated.attempt(libc, wheel)
