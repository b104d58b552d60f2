"""All that `tools/dev` installs is pinned, with hashes: tools/locks/ covers pyproject.toml and
nothing is installed beside it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "tools" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS, GROUPS = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
#: Extras that one lock covers together.
FRAMEWORKS = ("celery", "django", "dramatiq", "taskiq")
#: The requirements that each lock covers, as `lock_all` of tools/dev has them.
COVERS = {
    "dev": [
        *PROJECT["project"]["dependencies"],
        *PROJECT["build-system"]["requires"],
        *GROUPS["build"],
        *EXTRAS["gateway"],
        *EXTRAS["joblib"],
        *EXTRAS["kafka"],
        *EXTRAS["nats"],
        *EXTRAS["otel"],
        *EXTRAS["test"],
    ],
    "spark": EXTRAS["spark"],
    "frameworks": [*(want for name in FRAMEWORKS for want in EXTRAS[name]), *GROUPS["frameworks"]],
    **{f"{name}-tests": [] for name in FRAMEWORKS},  # source packages with their tests
    **{name: GROUPS[name] for name in ("arrow", "axe", "java", "bench", "fuzz", "monitoring")},
    **{name: GROUPS[name] for name in ("plot", "lock", "wheels")},
}
#: Which Pythons and machines may install them.
PLACES = [
    {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "sys_platform": "linux",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "platform_system": "Linux",
        "os_name": "posix",
    }
    for version in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Requirements of a lock, each with its hashes."""
    text = (LOCKS / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = []
    for item in " ".join(line.rstrip("\\") for line in lines).split(" --hash=sha256:"):
        hash_, _, rest = item.strip().partition(" ")
        if re.fullmatch("[0-9a-f]{64}", hash_):
            found[-1][1].append(hash_)
        else:
            rest = item.strip()
        if rest.strip():
            found.append((Requirement(rest.strip()), []))
    return found


def test_every_file_is_known_and_every_group_has_one() -> None:
    assert {path.stem for path in LOCKS.iterdir()} == COVERS.keys()
    no_group = {"dev", "spark", *(f"{name}-tests" for name in FRAMEWORKS)}
    assert set(GROUPS) == (COVERS.keys() - no_group) | {"build"}
    own = {"gateway", "joblib", "kafka", "nats", "otel", "spark", "test"}
    assert set(EXTRAS) == {*own, *FRAMEWORKS}


@pytest.mark.parametrize("name", COVERS)
def test_a_lock_has_versions_and_hashes_and_no_address(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert "://" not in text
    assert " @ " not in text
    words = {word.partition("=")[0] for word in text.split() if word.startswith("-")}
    assert words == {"--hash"}
    for requirement, hashes in entries(name):
        (pin,) = requirement.specifier
        assert pin.operator == "==", requirement
        assert "*" not in pin.version
        assert hashes, requirement


@pytest.mark.parametrize(
    "place", PLACES, ids=lambda p: f"{p['python_version']}-{p['platform_machine']}"
)
@pytest.mark.parametrize("name", COVERS)
def test_a_lock_covers_what_pyproject_asks_for(name: str, place: dict[str, str]) -> None:
    pinned: dict[str, Version] = {}
    for requirement, _ in entries(name):
        if requirement.marker is None or requirement.marker.evaluate(place):
            (pin,) = requirement.specifier
            key = canonicalize_name(requirement.name)
            assert key not in pinned, f"{key} twice"
            pinned[key] = Version(pin.version)
    for wanted in map(Requirement, COVERS[name]):
        if wanted.marker is not None and not wanted.marker.evaluate(place):
            continue
        key = canonicalize_name(wanted.name)
        assert key in pinned, f"{wanted} is not in tools/locks/{name}.txt: run tools/dev lock"
        assert pinned[key] in wanted.specifier, f"{key} {pinned[key]}: run tools/dev lock"
    if name != "dev":  # one environment holds them all
        for requirement, _ in entries("dev"):
            if requirement.marker is None or requirement.marker.evaluate(place):
                (pin,) = requirement.specifier
                key = canonicalize_name(requirement.name)
                assert pinned.get(key, Version(pin.version)) == Version(pin.version), key


def test_tools_dev_installs_nothing_without_hashes() -> None:
    script = (ROOT / "tools" / "dev").read_text() + (ROOT / "tools" / "prepare.sh").read_text()
    calls = re.findall(r"-m pip install .*", script)
    assert len(calls) == 2
    for call in calls:
        assert "--require-hashes" in call or "--no-deps --no-build-isolation -e ." in call, call


def test_peers_of_go_are_pinned() -> None:
    text = (ROOT / "tools" / "peers").read_text()
    modules = re.search(r"^modules='\n(.*?)^'", text, re.MULTILINE | re.DOTALL)
    assert modules
    for line in modules[1].splitlines():
        assert re.match(r"\S+@v[0-9.]+ ", line), line
    assert "GONOSUMDB" not in text
    assert "GOFLAGS=-insecure" not in text
