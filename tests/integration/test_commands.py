"""The command line as a process: what each command prints, and its exit status."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.processes import WATCHDOG, Child, eventually, wait_ended

import shmq
from shmq import shm, sources
from shmq.cli.status import DEGRADED, ERROR, INTERRUPTED, NOT_RUNNING, OK, USAGE

SHMQ = [sys.executable, "-m", "shmq"]


def run(*words: str, input: bytes | None = None, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`shmq WORDS`, to its end."""
    return subprocess.run(
        [*SHMQ, *words], input=input, capture_output=True, timeout=60, env={**os.environ, **env}
    )


def shown(*words: str, status: int = OK) -> str:
    """stdout of a command that ends with this status and says nothing else."""
    done = run(*words)
    assert (done.returncode, done.stderr) == (status, b"")
    return done.stdout.decode()


def documents(*words: str, status: int = OK) -> list[dict[str, Any]]:
    """The output of a command with `--json`: one object a line, of this version."""
    found = [json.loads(line) for line in shown(*words, status=status).splitlines()]
    assert all(document["v"] == 1 for document in found)
    return found


def one_sentence(done: subprocess.CompletedProcess[bytes]) -> str:
    """Its error: one line, no traceback."""
    text = done.stderr.decode()
    assert text.startswith("shmq: ")
    assert text.count("\n") == 1
    return text


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Children can be interrupted, also when these tests run in the background of a shell, which
    has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ---- what all of them have ----


def test_without_an_instance_the_status_says_so(instance: str) -> None:
    for line in ("stat", "tail t", "tail t --peek", "peek t", "pub t m", "topic create t"):
        done = run(*line.split(), "--instance", instance)
        assert done.returncode == NOT_RUNNING
        assert "shmq serve" in one_sentence(done)


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-command"],
        ["stat", "--no-such-option"],
        ["stat", "--prometheus", "--json"],
        ["stat", "--sort", "colour"],
        ["tail"],
        ["tail", "t", "--raw", "--json"],
        ["tail", "t.*"],
        ["tail", "t.*", "c", "--peek"],
        ["tail", "t", "-n", "0"],
        ["doctor", "--yes"],
        ["doctor", "--fix"],
        ["pub", "t", "m", "--defer", "soon"],
        ["bench", "--seconds", "0"],
        [],
    ],
)
def test_wrong_usage_is_2(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == USAGE
    assert b"Usage:" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_bad_name_is_an_error_in_one_sentence(broker: shmq.Broker) -> None:
    for words in (["tail", "no good"], ["topic", "create", "no/good"]):
        done = run(*words, f"--instance={broker.instance}")
        assert done.returncode == ERROR
        assert "not valid" in one_sentence(done)
    done = run("stat", "--instance", "no/good")
    assert done.returncode == ERROR
    assert "not valid" in one_sentence(done)


# ---- tail ----


def test_tail_takes_and_finishes(broker: shmq.Broker) -> None:
    broker.producer("t").publish_many([b"one", b"two", b"three"])
    broker.create_channel("t", "c")
    assert shown("tail", "t", "c", "-n", "2", f"--instance={broker.instance}") == "one\ntwo\n"
    channel = broker.stats().channel("t", "c")
    assert (channel.depth, channel.in_flight, channel.finished) == (1, 0, 2)


def test_tail_of_a_pattern_tells_the_topics(broker: shmq.Broker) -> None:
    where = f"--instance={broker.instance}"
    assert shown("pub", "jobs", "one", "two", "--priority", "high", where) == ""
    assert shown("pub", "jobs", "three", where) == ""
    found = shown("tail", "jobs.*", "c", "-n", "2", where)
    assert found == "jobs.high\tone\njobs.high\ttwo\n"
    assert shown("tail", "job*", "c", "-n", "1", "--raw", where) == "three"
    broker.producer("jobs").publish(b"four")
    (document,) = documents("tail", "job*", "c", "-n", "1", "--json", where)
    assert (document["topic"], document["body"]) == ("jobs", "four")


def test_tail_as_json_tells_text_from_bytes(broker: shmq.Broker) -> None:
    consumer = broker.consumer("t", "c")
    ids = [broker.producer("t").publish(body) for body in ("wörld\n".encode(), b"\xff\0")]
    message = consumer.take(1)
    assert message is not None
    message.requeue()
    consumer.close()
    other, text = documents("tail", "t", "c", "-n2", "--json", f"--instance={broker.instance}")
    assert (text["id"], text["body"], text["attempts"]) == (ids[0], "wörld\n", 2)
    assert (other["id"], other["attempts"]) == (ids[1], 1)
    assert base64.b64decode(other["body_base64"]) == b"\xff\0"
    assert text["timestamp"] == message.timestamp


def test_tail_raw_adds_nothing(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"\x00\x1b[31m", b"\xff"])
    done = run("tail", "t", "c", "-n2", "--raw", f"--instance={broker.instance}")
    assert done.stdout == b"\x00\x1b[31m\xff"


def test_tail_has_a_channel_of_its_own_that_goes_with_it(
    broker: shmq.Broker, keep: Callable[[Any], Any]
) -> None:
    broker.create_channel("t", "c")
    child = keep(Child([*SHMQ, "tail", "t", f"--instance={broker.instance}"]))

    def channels() -> set[str]:
        return {channel.name or "" for channel in broker.stats().topic("t").channels}

    eventually(lambda: len(channels()) == 2)
    (own,) = channels() - {"c"}
    assert own.startswith("tail")
    assert own.endswith("#ephemeral")
    broker.producer("t").publish(b"body")
    child.said("body")
    assert broker.stats().channel("t", "c").depth == 1
    assert child.kill(signal.SIGINT) == INTERRUPTED
    assert child.errors.strip() == ""
    eventually(lambda: channels() == {"c"})


def test_tail_does_not_throw_away_what_waits_for_a_first_channel(broker: shmq.Broker) -> None:
    broker.producer("t").publish(b"body")
    done = run("tail", "t", f"--instance={broker.instance}")
    assert done.returncode == ERROR
    assert "--peek" in one_sentence(done)
    assert broker.stats().topic("t").depth == 1
    assert shown("tail", "t", "--peek", f"--instance={broker.instance}") == "body\n"
    assert broker.stats().topic("t").depth == 1


def test_tail_peek_takes_nothing(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"one", b"two"])
    where = f"--instance={broker.instance}"
    assert shown("tail", "t", "c", "--peek", where) == "one\ntwo\n"
    assert shown("tail", "t", "c", "--peek", "-n", "1", "--raw", where) == "one"
    (document,) = documents("tail", "t", "c", "--peek", "-n1", "--json", where)
    assert (document["body"], document["attempts"]) == ("one", 0)
    assert broker.stats().channel("t", "c").depth == 2
    assert "no t/d" in one_sentence(run("tail", "t", "d", "--peek", where))


def test_tail_gives_back_what_it_could_not_write(broker: shmq.Broker) -> None:
    """A pipe that nobody reads takes some messages; the one it did not take is not lost."""
    consumer = broker.consumer("t", "c")
    consumer.close()
    count, body = 40, b"x" * 8192
    broker.producer("t").publish_many([b"%04d" % number + body for number in range(count)])
    with subprocess.Popen(
        [*SHMQ, "tail", "t", "c", f"--instance={broker.instance}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        try:
            eventually(lambda: broker.stats().channel("t", "c").in_flight == 1)  # the pipe is full
            child.send_signal(signal.SIGINT)
            written, errors = child.communicate(timeout=WATCHDOG)
        finally:
            child.kill()
    assert child.returncode == INTERRUPTED
    assert errors.strip() == b""
    finished = broker.stats().channel("t", "c").finished
    assert finished == count - broker.stats().channel("t", "c").depth
    assert finished <= len(written) // (len(body) + 5) <= finished + 1
    assert broker.stats().channel("t", "c").in_flight == 0


@pytest.mark.parametrize("size", [1, 3000, 200_000])
def test_tail_finishes_what_the_reader_of_its_pipe_has_read(broker: shmq.Broker, size: int) -> None:
    """A pipe has room for many messages that a reader which ends never sees."""
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"%d" % number * size for number in range(1, 8)])
    words = " ".join([*SHMQ, "tail", "t", "c", f"--instance={broker.instance}"])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -2"], capture_output=True, timeout=WATCHDOG
    )
    assert done.stdout == b"1" * size + b"\n" + b"2" * size + b"\n"
    assert done.stderr == b""
    channel = broker.stats().channel("t", "c")
    assert (channel.finished, channel.depth, channel.in_flight) == (2, 5, 0)


def test_tail_keeps_a_message_that_its_reader_has_not_read_yet(broker: shmq.Broker) -> None:
    """Its timeout begins again and again, so that nobody else gets it meanwhile."""
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"one", b"two"])
    where = f"--instance={broker.instance}"

    def until() -> float:
        found = documents("peek", "t", "c", "--state=in_flight", "--json", where)
        return float(found[0]["until"]) if found else 0.0

    with subprocess.Popen([*SHMQ, "tail", "t", "c", where], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            first = eventually(until)
            eventually(lambda: until() > first)
            assert broker.stats().channel("t", "c").finished == 0
            found = os.read(child.stdout.fileno(), 100)
            eventually(lambda: broker.stats().channel("t", "c").finished == 1)
        finally:
            child.kill()
    assert found == b"one\n"


def test_tail_says_that_it_makes_a_channel(broker: shmq.Broker) -> None:
    """A name that was mistyped would collect messages for ever."""
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x")
    where = f"--instance={broker.instance}"
    assert b"no channel" not in run("tail", "t", "c", "-n1", where).stderr
    broker.create_topic("typo")
    broker.producer("typo").publish(b"x")
    done = run("tail", "typo", "c", "-n1", where)
    assert done.stdout == b"x\n"
    assert b"there was no channel typo/c; it is made" in done.stderr
    command = done.stderr.decode().split("(shmq ")[1].split(")")[0]
    assert run(*command.split()).returncode == 0


def test_tail_ends_when_its_reader_has_gone(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"first")
    words = " ".join([*SHMQ, "tail", "t", "c", f"--instance={broker.instance}"])
    # `tail` is not told by a message: nobody publishes any more
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        timeout=30,
    )
    assert done.stdout == b"first\n0\n"
    assert done.stderr == b""


def test_tail_says_when_its_channel_is_deleted(
    broker: shmq.Broker, keep: Callable[[Any], Any]
) -> None:
    child = keep(Child([*SHMQ, "tail", "t", "c", f"--instance={broker.instance}"]))
    # Only with its consumer there: one that comes later makes the topic again.
    eventually(lambda: any(c.sessions for t in broker.stats().topics for c in t.channels))
    broker.delete_topic("t")
    assert child.wait() == ERROR
    assert "deleted" in child.errors
    assert "Traceback" not in child.errors


# ---- stat ----


def test_stat_sorts(broker: shmq.Broker) -> None:
    for channel, count in (("a", 1), ("b", 3), ("c", 2)):
        broker.create_channel(f"topic-{channel}", channel)
        broker.producer(f"topic-{channel}").publish_many([b"x"] * count)
        time.sleep(0.05)  # their ages are not read at the same moment

    def order(column: str) -> list[str]:
        lines = shown("stat", "--sort", column, f"--instance={broker.instance}").splitlines()
        return [line.split()[0][-1] for line in lines[2:]]

    assert order("depth") == ["b", "c", "a"]
    assert order("in") == ["b", "c", "a"]
    assert order("name") == ["a", "b", "c"]
    assert order("oldest") == ["a", "b", "c"]


def test_stat_for_prometheus_can_be_parsed(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"x"] * 3)
    page = shown("stat", "--prometheus", f"--instance={broker.instance}")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (sample,) = families["shmq_ready_messages"].samples
    assert sample.value == 3
    assert sample.labels == {"broker": broker.instance, "topic": "t", "channel": "c"}
    assert families["shmq_messages_published"].type == "counter"
    assert families["shmq_supervisor_up"].samples[0].value == 1


def test_stat_and_peek_of_a_dead_supervisor_are_degraded(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    server = serve()
    attach().create_channel("t", "c")
    server.kill()
    where = f"--instance={instance}"
    assert "DEAD" in shown("stat", where, status=DEGRADED)
    assert "supervisor_up{" in shown("stat", "--prometheus", where, status=DEGRADED)
    empty = run("peek", "t", "c", where)
    assert (empty.returncode, empty.stdout) == (DEGRADED, b"")
    assert empty.stderr == b"no message of t/c is ready in memory\n"
    shown("tail", "--peek", "t", "c", where, status=DEGRADED)
    found = documents("doctor", "--json", where, status=DEGRADED)
    (problem,) = (item for item in found if item["level"] == "problem")
    assert problem["check"] == "supervisor"
    assert "shmq serve" in problem["remedy"]
    assert not problem["fixable"]


# ---- inspect ----


def test_inspect_of_all_that_an_instance_has(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"one", b"\xff"])
    (directory,) = documents("inspect", broker.instance, "--json")
    assert directory["kind"] == "directory segment"
    assert directory["supervisor_alive"] is True
    assert [(row["topic"], row["channel"]) for row in directory["queues"]] == [("t", "c")]
    serial = directory["queues"][0]["serial"]
    for name in (
        f"/shmq.{broker.instance}.{serial}",
        f"shmq.{broker.instance}.{serial}",
        shm.path_of(shm.queue_name(broker.instance, serial)),
    ):
        (queue,) = documents("inspect", name, "--json")
        assert queue["kind"] == "queue segment"
        assert queue["damage"] == []
        assert queue["messages"][0]["body"] == "one"
        assert base64.b64decode(queue["messages"][1]["body_base64"]) == b"\xff"
    assert "READY" in shown("inspect", f"shmq.{broker.instance}.{serial}")
    assert broker.data_path is not None
    path, base = broker.data_path, broker.stats().channel("t", "c")
    assert base.depth == 2
    broker.close()
    (metadata,) = documents("inspect", str(path / "nsqd.dat"), "--json")
    assert {(row["topic"], row["channel"]) for row in metadata["topics_list"]} == {
        ("t", ""),
        ("t", "c"),
    }
    (records,) = documents("inspect", str(path / "t:c.diskqueue.000001.dat"), "--json")
    assert [row["bytes"] for row in records["records_list"]] == [3, 1]
    (positions,) = documents("inspect", str(path / "t:c.diskqueue.meta.dat"), "--json")
    assert (positions["depth"], positions["damage"]) == (2, [])
    assert "id clock" in shown("inspect", str(path / "shmq.dat"))


def test_results_are_listed_and_printed(broker: shmq.Broker) -> None:
    where = ("--instance", broker.instance)
    store = broker.results("r", max_keys=100)
    store.set("key", b"value\n", ttl=600)
    store.set(b"\xff", bytes(5))
    row = shown("results", "ls", *where).splitlines()[1].split()
    assert row[:3] == ["r", "2", "100"]
    (found,) = documents("results", "ls", "--json", *where)
    assert (found["name"], found["keys"], found["max_keys"], found["stored"]) == ("r", 2, 100, 2)
    listed = {
        json.dumps(row.get("key")): row for row in documents("results", "ls", "r", "--json", *where)
    }
    assert listed['"key"']["bytes"] == 6
    assert 500 < listed['"key"']["ttl"] < 600
    assert listed["null"]["key_base64"] == base64.b64encode(b"\xff").decode()
    assert listed["null"]["ttl"] is None
    assert len(shown("results", "ls", "r", "-n", "1", *where).splitlines()) == 2
    assert shown("results", "get", "r", "key", *where) == "value\n"
    (found,) = documents("results", "get", "r", "key", "--json", *where)
    assert found["body"] == "value\n"
    for words, status in (
        (("get", "r", "none"), ERROR),
        (("get", "x", "k"), ERROR),
        (("ls", "x"), ERROR),
    ):
        done = run("results", *words, *where)
        assert done.returncode == status
        assert "there is no" in one_sentence(done)
    assert shown("results", "delete", "r", *where) == "r deleted\n"
    assert shown("results", "ls", *where).count("\n") == 1
    assert broker.results_names() == []


def test_inspect_of_a_results_store(broker: shmq.Broker) -> None:
    broker.results("r").set("k", b"v")
    (path,) = [item.path for item in shm.list_objects(broker.instance) if item.kind == "queue"]
    (found,) = documents("inspect", path, "--json")
    assert found["kind"] == "store segment"
    assert (found["name"], found["keys"], found["max_keys"]) == ("r", 1, 1_000_000)
    assert "k" in shown("inspect", path)
    assert shown("doctor", "--instance", broker.instance)


def test_inspect_says_what_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "nsqd.dat"
    file.write_bytes(b'{"topics":[')
    (document,) = documents("inspect", str(file), "--json", status=DEGRADED)
    assert document["damage"][0]["offset"] == 11
    assert "DAMAGE at 11" in shown("inspect", str(file), status=DEGRADED)


def test_inspect_of_what_is_not_there_or_not_ours(tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.write_bytes(b"#!/bin/sh\n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for file in (tmp_path / "nothing", strange, fifo, tmp_path):
        done = run("inspect", str(file))
        assert done.returncode == ERROR
        assert str(file) in one_sentence(done)


# ---- doctor ----


def test_doctor_of_a_healthy_instance(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    found = documents("doctor", "--json", f"--instance={broker.instance}")
    mine = {item["check"]: item for item in found if item["instance"] == broker.instance}
    assert {item["level"] for item in mine.values()} == {"ok"}
    assert str(broker.data_path) in mine["data path"]["text"]
    assert "in place" in shown("doctor", f"--instance={broker.instance}")


def test_doctor_removes_what_is_dead_and_only_that(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> None:
    where = f"--instance={instance}"
    server = serve()
    client = attach()
    client.create_channel("t", "c")
    client.producer("t").publish(b"body")
    server.kill()
    before = shm.list_objects(instance)
    shown("doctor", "--fix", "--yes", where, status=DEGRADED)
    assert shm.list_objects(instance) == before  # a supervisor can take it up

    shm.unlink_segment(shm.directory_name(instance))  # somebody's rm
    text = shown("doctor", "--fix", "--yes", where, status=DEGRADED)
    assert "processes still use them" in text  # the client's are mapped
    client.close()
    (problem,) = (
        item
        for item in documents("doctor", "--json", where, status=DEGRADED)
        if item["level"] == "problem"
    )
    assert problem["fixable"]
    assert "removed 3 objects" in shown("doctor", "--fix", "--yes", where)
    assert not shm.list_objects(instance)
    shown("doctor", where, status=NOT_RUNNING)


def test_doctor_sees_a_stopped_supervisor(serve: Callable[..., Child], instance: str) -> None:
    server = serve()
    server.stop()
    try:

        def silent() -> bool:
            done = run("doctor", "--json", f"--instance={instance}")
            return done.returncode == DEGRADED and b"has not moved" in done.stdout

        eventually(silent)
    finally:
        server.go_on()


# ---- bench ----


def test_bench_measures_every_line(keep: Callable[[Any], Any]) -> None:
    words = ["--json", "--seconds", "0.5", "--size", "20", "--count", "50"]
    child = keep(Child([*SHMQ, "bench", *words]))
    found = [json.loads(line) for line in child.succeed()]
    assert [item["line"] for item in found] == ["one", "lists", "roundtrip"]
    assert all(item["messages_per_second"] > 0 for item in found)
    assert 0 < found[2]["p50_us"] <= found[2]["p99_us"]
    assert not shm.list_objects(f"bench-{child.pid}")


def answering(instance: str) -> bool:
    """Is there a supervisor of this name by now?"""
    with contextlib.suppress(shmq.ShmqError):
        return sources.open_readonly(instance).directory.read("supervisor_pid") > 0
    return False


def test_bench_interrupted_leaves_nothing(keep: Callable[[Any], Any]) -> None:
    child = keep(Child([*SHMQ, "bench", "--seconds", "60"]))
    name = f"bench-{child.pid}"
    eventually(lambda: answering(name))
    directory = sources.open_readonly(name).directory
    supervisor = directory.read("supervisor_pid")
    eventually(lambda: len(directory.clients["state"].nonzero()[0]) >= 4)  # both are at work
    assert child.kill(signal.SIGINT) == INTERRUPTED
    assert "Traceback" not in child.errors
    wait_ended(supervisor)
    assert not shm.list_objects(name)


# ---- dead letters ----


def test_dead_letters_are_listed_redriven_and_dropped(broker: shmq.Broker) -> None:
    where = ("t", "c", "--instance", broker.instance)
    broker.create_channel("t", "c")
    assert documents("dead", "ls", *where, "--json") == []
    assert shown("dead", "redrive", *where) == "0 messages redriven\n"
    broker.producer("t").publish_many([b"one", b"two", b"\xff"])
    consumer = broker.consumer("t", "c")
    for error in ("too late", None, "bad"):
        consumer.take(20).reject(error)
    groups = documents("dead", "ls", *where, "--json")
    assert {(group["reason"], group["error"], group["count"]) for group in groups} == {
        ("rejected", "too late", 1),
        ("rejected", None, 1),
        ("rejected", "bad", 1),
    }
    assert "too late" in shown("dead", "ls", *where)
    (letter,) = documents("dead", "peek", *where, "--json", "--error", "late")
    assert (letter["body"], letter["source"], letter["pid"]) == ("one", "t/c", os.getpid())
    assert "one" in shown("dead", "peek", *where, "--reason", "rejected")
    assert documents("dead", "peek", *where, "--json", "--reason", "expired") == []
    assert documents("dead", "redrive", *where, "--json", "--error", "late")[0]["redriven"] == 1
    assert consumer.take(20).body == b"one"
    assert shown("dead", "drop", *where, "-n", "1") == "1 messages dropped\n"
    assert documents("dead", "drop", *where, "--json")[0]["dropped"] == 1
    assert broker.dead("t", "c").depth == 0
    (channel,) = broker.stats().topic("t").channels
    assert channel.dead_lettered == 3


def test_dead_letters_of_nowhere_are_an_error_in_one_sentence(broker: shmq.Broker) -> None:
    done = run("dead", "ls", "t", "nowhere", "--instance", broker.instance)
    assert done.returncode == ERROR
    assert "t/nowhere" in one_sentence(done)
    assert run("dead", "ls", "t", "c", "--reason", "boredom").returncode == USAGE
