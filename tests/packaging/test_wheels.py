"""The wheels for this machine, of both C libraries, and the source distribution: made by `tools/dev
wheels`, with all of their files and no others; that of this C library is installed and run where
there is no compiler, also in the roots of Debian that `tools/dev roots` left in its cache, and the
core's C tests are run with the other one."""

from __future__ import annotations

import importlib.util
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


wheels = load(BUILDER)
roots = load(ROOTS)


#: One of each C library.
HERE = [target for target in wheels.TARGETS if target.machine == platform.machine()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheels for this machine."""
    folder = tmp_path_factory.mktemp("wheels")
    targets = [f"--target={target.name}" for target in HERE]
    command = [sys.executable, BUILDER, *targets, "--into", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(params=HERE, ids=lambda target: target.name)
def wheel(made: Path, request: pytest.FixtureRequest) -> Path:
    (path,) = (wheel for wheel in made.glob("*.whl") if request.param.names(tag_of(wheel)))
    return path


def tag_of(wheel: Path) -> str:
    return wheel.stem.split("-")[-1]


def tracked(*paths: str) -> set[str]:
    """The files that git has below these paths."""
    done = subprocess.run(
        ["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=True
    )
    return {name.decode() for name in done.stdout.split(b"\0") if name}


def test_a_wheel_has_the_files_of_its_packages_and_the_extension(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename for info in archive.infolist() if not info.is_dir()}
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - about == tracked("shmq", "pyspark_shmq") | {wheels.EXTENSION}
    assert {name.partition("/")[2] for name in about} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_a_wheel_is_for_every_python_from_the_stable_abi_on(wheel: Path) -> None:
    assert wheel.stem.split("-")[2:4] == ["cp311", "abi3"]


def test_the_source_distribution_has_what_git_has(made: Path) -> None:
    (path,) = made.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert names == tracked() | {"PKG-INFO"}


@pytest.mark.parametrize("wheel", [target for target in HERE if target.runs_here], indirect=True)
@pytest.mark.parametrize("python", list(wheels.pythons()))
def test_a_wheel_works_where_there_is_no_compiler(wheel: Path, python: str) -> None:
    wheels.fresh(python, wheel)


@pytest.mark.parametrize("wheel", [target for target in HERE if target.runs_here], indirect=True)
@pytest.mark.parametrize(
    "root", [root for root in roots.ROOTS if not root.from_source], ids=lambda root: root.suite
)
def test_a_wheel_works_in_a_fresh_root(wheel: Path, root: Any) -> None:
    if reason := roots.lacking():
        pytest.skip(f"this {reason}")
    if not roots.place(root).is_dir():
        pytest.skip(f"`tools/dev roots {root.suite}` makes this root, which takes a minute")
    roots.attempt(root, wheel)


def test_the_core_passes_its_tests_with_musl() -> None:
    done = subprocess.run([sys.executable, MUSL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
