"""The commands where the packages of an extra are missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child, eventually

import shmq

#: As if these were not installed.
_WITHOUT = "import sys\nsys.modules.update(dict.fromkeys({names!r}))\n"
_MAIN = "from shmq.__main__ import main\nsys.exit(main())\n"

Start = Callable[..., Child]


@pytest.fixture
def start(keep: Callable[[Any], Any]) -> Start:
    """`start(*words, without=...)`: a command without these modules."""

    def begin(*words: str, without: tuple[str, ...] = ("aiohttp",)) -> Child:
        code = _WITHOUT.format(names=without) + _MAIN
        return keep(Child([sys.executable, "-c", code, *words]))

    return begin


@pytest.mark.parametrize("module", ["aiohttp", "cramjam", "re2"])
def test_serve_without_the_gateway_serves_shared_memory(
    start: Start, instance: str, data_path: Path, module: str
) -> None:
    server = start("serve", f"--instance={instance}", f"--data-path={data_path}", without=(module,))
    eventually(lambda: "running, pid" in server.errors)
    assert f"no gateway, shared memory only: {module} is not installed" in server.errors
    assert "listening" not in server.errors
    with shmq.attach(instance) as broker:
        broker.producer("t").publish(b"x")
        with broker.consumer("t", "c") as consumer:
            message = consumer.take(0)
            assert message is not None
            message.finish()


@pytest.mark.parametrize(
    "words",
    [
        ["--tcp-address=127.0.0.1:0"],
        ["--http-address=127.0.0.1:0", "--tcp-address="],
        ["--max-connections=7"],
        ["--nsqd"],
        ["--config={path}/file.toml"],
    ],
)
def test_a_gateway_that_was_asked_for_is_missed(
    start: Start, instance: str, data_path: Path, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file.toml").write_text('http_address = "127.0.0.1:0"\n')
    words = [word.format(path=tmp_path) for word in words]
    server = start("serve", f"--instance={instance}", f"--data-path={data_path}", *words)
    assert server.wait() == 1
    (line,) = server.errors.splitlines()
    assert "aiohttp is not installed: pip install 'shmq[gateway]'" in line


def test_page_says_in_a_sentence_what_it_needs(start: Start, instance: str) -> None:
    child = start("page", f"--instance={instance}")
    assert child.wait() == 1
    assert child.errors == "shmq: the page needs aiohttp: pip install 'shmq[gateway]'\n"
