"""The command line as its users have it: exit status, stdout, stderr, pipes and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import take_all
from support.processes import NO_GATEWAY, WATCHDOG, Child, answers, eventually

import shmq
from shmq import shm
from shmq.options import OPTIONS

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

OK, ERROR, USAGE, NOT_RUNNING, DEGRADED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def run(
    *words: str, instance: str | None = None, stdin: bytes = b"", **how: Any
) -> subprocess.CompletedProcess[bytes]:
    """`shmq WORDS` to its end."""
    env = {**os.environ, **({"SHMQ_INSTANCE": instance} if instance else {})}
    argv = [sys.executable, "-m", "shmq", *words]
    return subprocess.run(argv, input=stdin, capture_output=True, env=env, timeout=WATCHDOG, **how)


def documents(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    """The JSON objects it printed, one a line."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_published_is_shown_and_delivered(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve()
    assert run("channel", "create", "t", "c", instance=instance).returncode == OK
    assert run("pub", "t", "one", "two words", instance=instance).returncode == OK
    assert run("pub", "t", instance=instance, stdin=b"three\n\nfour\r\nfive").returncode == OK
    stat = run("stat", "--json", instance=instance)
    assert stat.returncode == OK
    (document,) = documents(stat)
    (topic,) = document["topics"]
    assert topic["topic_name"] == "t"
    assert topic["channels"][0]["depth"] == 5
    table = run("stat", instance=instance)
    assert table.returncode == OK
    assert b"t/c" in table.stdout
    peeked = run("peek", "t", "c", "--json", "-n", "2", instance=instance)
    assert [message["body"] for message in documents(peeked)] == ["one", "two words"]
    assert b"three" in run("peek", "t", "c", instance=instance).stdout
    expected = [b"one", b"two words", b"three", b"four", b"five"]
    assert take_all(attach(), "t", "c").bodies == expected


def test_topics_and_channels_are_made_paused_emptied_and_deleted(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve()
    broker = attach()

    def does(*words: str) -> bool:
        return run(*words, instance=instance).returncode == OK

    assert does("topic", "create", "t")
    assert does("channel", "create", "t", "c")
    assert does("channel", "pause", "t", "c")
    assert broker.stats().topics[0].channels[0].paused
    assert does("channel", "unpause", "t", "c")
    assert does("topic", "pause", "t")
    assert broker.stats().topics[0].paused
    assert does("topic", "unpause", "t")
    broker.producer("t").publish_many([b"x"] * 7)
    emptied = run("channel", "empty", "t", "c", "--json", instance=instance)
    assert documents(emptied)[0]["dropped"] == 7
    assert does("channel", "delete", "t", "c")
    assert does("topic", "delete", "t")
    assert broker.stats().topics == []


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("pub", "no such name!", "x"), ERROR, "not valid"),
        (("topic", "delete", "missing"), ERROR, "missing"),
        (("peek", "missing", "c"), ERROR, "missing"),
        (("pub", "t", "--defer", "5", "x"), USAGE, "unit"),
        (("stat", "--no-such-option"), USAGE, "no-such-option"),
        (("nonsense",), USAGE, "nonsense"),
        (("serve", "--mem-queue-size=many"), USAGE, "whole number"),
        (("serve", "--data-path=/nonexistent"), ERROR, "/nonexistent"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence_on_stderr(
    serve: Serve, instance: str, words: tuple[str, ...], status: int, sentence: str
) -> None:
    if words[0] != "serve":
        serve()
    done = run(*words, instance=instance)
    assert done.returncode == status
    assert done.stdout == b""
    assert sentence in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("stat",),
        ("peek", "t", "c"),
        ("pub", "t", "x"),
        ("topic", "create", "t"),
        ("channel", "delete", "t", "c"),
    ],
)
def test_an_instance_that_does_not_run_is_status_3(instance: str, words: tuple[str, ...]) -> None:
    done = run(*words, instance=instance)
    assert done.returncode == NOT_RUNNING
    assert instance in done.stderr.decode()
    assert b"shmq serve" in done.stderr


def test_looking_works_while_the_supervisor_is_dead_and_says_so(
    serve: Serve, attach: Attach, instance: str
) -> None:
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    server.kill()
    broker.producer("t").publish(b"still")
    stat = run("stat", instance=instance)
    assert stat.returncode == DEGRADED
    assert b"DEAD" in stat.stdout
    (document,) = documents(run("stat", "--json", instance=instance))
    assert document["topics"][0]["channels"][0]["depth"] == 1
    peeked = run("peek", "t", "c", instance=instance)
    assert peeked.returncode == DEGRADED
    assert b"still" in peeked.stdout
    assert run("pub", "t", "more", instance=instance).returncode == OK
    assert run("topic", "create", "new", instance=instance).returncode == NOT_RUNNING


def test_who_holds_a_message_since_when_and_until_when(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    producer.publish(b"held")
    began = time.time_ns()
    consumer = broker.consumer("t", "c", msg_timeout=45.0)
    assert consumer.take(timeout=10) is not None
    (python,) = broker.peek("t", "c", "in_flight")
    (message,) = documents(run("peek", "t", "c", "--state=in_flight", "--json", instance=instance))
    assert message["state"] == "in_flight"
    assert message["pid"] == python.pid == os.getpid()
    assert message["client"] == python.client
    slack = 10**8  # the two clocks are read one after the other
    assert began - slack <= message["since"] <= time.time_ns() + slack
    lasts = message["until"] - message["since"]
    assert abs(lasts - 45 * 10**9) < 10**9
    assert python.until is not None
    assert abs(python.until - message["until"]) < 10**9
    assert broker.peek("t", "c", "in_flight")[0].id == python.id
    for spelling in ("in_flight", "in_flight"):
        table = run("peek", "t", "c", "--state", spelling, instance=instance).stdout.decode()
        titles, row = table.splitlines()
        assert titles.split() == [
            "ID",
            "PID",
            "COMMAND",
            "TAKEN",
            "DEADLINE",
            "ATTEMPTS",
            "BYTES",
            "BODY",
        ]
        assert re.fullmatch(
            rf"{python.id} +{os.getpid()} +\S+ +[0-9]+\w+ +[0-9]+\.[0-9]s +1 +4 +held", row
        ), row
    listed = run("stat", "--clients", instance=instance).stdout.decode().splitlines()
    assert re.match(rf"t/c +{os.getpid()} .* 1 +200 ", listed[-1]), listed
    with broker.consumer("t", "never", msg_timeout=None) as patient:
        producer.publish(b"for ever")
        assert patient.take(timeout=10) is not None
        (message,) = documents(
            run("peek", "t", "never", "--state=in_flight", "--json", instance=instance)
        )
        assert message["until"] is None
        table = run("peek", "t", "never", "--state=in_flight", instance=instance).stdout
        assert b" never " in table
    producer.publish(b"later", defer=500)
    table = run("peek", "t", "c", "--state=deferred", instance=instance).stdout.decode()
    due = re.search(r" ([0-9]+)\.[0-9]s +0 +5 +later", table)
    assert due is not None
    assert 400 < int(due[1]) <= 500
    back = run("peek", "t", "never", "--state=requeued", "--json", instance=instance)
    assert [item["body"] for item in documents(back)] == ["for ever"]
    assert [item.body for item in broker.peek("t", "never", "requeued")] == [b"for ever"]


def test_a_peek_at_nothing_says_so(serve: Serve, attach: Attach, instance: str) -> None:
    serve()
    attach().create_channel("t", "c")
    done = run("peek", "t", "c", "--state=deferred", instance=instance)
    assert (done.returncode, done.stdout) == (OK, b"")
    assert b"no message of t/c is deferred in memory" in done.stderr
    assert run("peek", "t", "c", "--json", instance=instance).stderr == b""


def test_a_supervisor_in_another_pid_namespace_is_not_called_dead(
    serve: Serve, instance: str
) -> None:
    server = serve()
    argv = ["unshare", "-rpf", "--mount-proc", sys.executable, "-m", "shmq", "stat"]
    argv.append(f"--instance={instance}")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert done.returncode == OK, done.stderr
    assert "alive in another PID namespace" in done.stdout
    assert not re.search(r"supervisor pid \d+ DEAD", done.stdout)
    server.stop()
    try:
        eventually(
            lambda: (
                subprocess.run(argv, capture_output=True, timeout=WATCHDOG, check=False).returncode
                == DEGRADED
            )
        )
    finally:
        server.go_on()


def test_the_options_of_serve_are_under_titles() -> None:
    text = run("serve", "--help").stdout.decode()
    titles = re.findall(r"^Options(?: \((.+)\))?:$", text, re.M)
    assert titles[0] == ""
    assert len(titles) == len(set(titles)) > 4
    assert text.index("--drain") < text.index(f"({titles[1]})") < text.index("--mem-queue-size")
    for option in OPTIONS.values():
        assert len(re.findall(rf"^  {option.flag} ", text, re.M)) == 1, option.flag


def test_summaries_are_whole(instance: str) -> None:
    text = run("--help").stdout.decode()
    assert "..." not in text.partition("Commands:")[2]
    assert "_SHMQ_COMPLETE=bash_source" in text


def test_a_live_table_ends_with_ctrl_c_and_when_its_reader_goes(
    serve: Serve, instance: str, keep: Callable[[Any], Any]
) -> None:
    serve()
    argv = [sys.executable, "-m", "shmq", "stat", "-i", "0.1", "--json", "--instance", instance]
    for end in ("interrupt", "close the pipe"):
        live = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert live.stdout is not None
        assert live.stderr is not None
        for _ in range(3):
            assert json.loads(live.stdout.readline())["v"] == 1
        if end == "interrupt":
            live.send_signal(signal.SIGINT)
            status = live.wait(30)
            assert status in (INTERRUPTED, -signal.SIGINT)
            live.stdout.close()
        else:
            live.stdout.close()
            status = live.wait(30)
            assert status in (-signal.SIGPIPE, ERROR, OK)
        assert b"Traceback" not in live.stderr.read()
        live.stderr.close()
    counted = run("stat", "-i", "0.05", "-n", "3", "--json", instance=instance)
    assert len(documents(counted)) == 3


@pytest.mark.parametrize(("output", "status"), [(">&-", "0"), ("> /dev/full", "1")])
def test_an_output_that_cannot_be_written_is_no_traceback(output: str, status: str) -> None:
    program = f"{sys.executable} -m shmq --help {output}; echo $? >&2"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == status


def test_no_file_takes_the_number_of_a_closed_standard_stream(
    instance: str, tmp_path: Path
) -> None:
    words = f"{sys.executable} -m shmq serve --instance={instance} --data-path={tmp_path}"
    none = "--tcp-address= --http-address= --https-address="
    server = subprocess.Popen(["sh", "-c", f"exec {words} {none} <&- >&- 2>&-"])
    try:
        with shmq.attach(instance, timeout=60):
            there = [os.readlink(f"/proc/{server.pid}/fd/{number}") for number in range(3)]
        assert there == ["/dev/null"] * 3
    finally:
        server.terminate()
        assert server.wait() == OK
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m shmq ls 2>&-"], check=False)
    assert done.returncode == OK


def test_pub_waits_for_room_or_says_that_there_is_none(
    serve: Serve, attach: Attach, instance: str
) -> None:
    server = serve(mem_queue_size=256)
    broker = attach()
    broker.create_channel("t", "c")
    server.kill()
    lines = b"".join(b"%d\n" % i for i in range(1000))
    done = run("pub", "t", "--timeout", "100ms", instance=instance, stdin=lines)
    assert done.returncode == ERROR
    assert b"supervisor" in done.stderr
    serve(mem_queue_size=256)
    done = run("pub", "t", "--timeout", "30s", instance=instance, stdin=lines)
    assert done.returncode == OK
    bodies = take_all(broker, "t", "c").bodies
    assert bodies[-1000:] == lines.splitlines()


def test_pub_of_a_file_that_fails_half_way_says_where_to_go_on(
    serve: Serve, attach: Attach, instance: str
) -> None:
    serve(max_msg_size=1000)
    broker = attach()
    broker.create_channel("t", "c")
    good = [b"%d" % number for number in range(250)]
    done = run("pub", "t", instance=instance, stdin=b"\n".join([*good, bytes(1001)]))
    assert done.returncode == ERROR
    assert b"the first 250 lines that are not empty were published" in done.stderr
    assert b"go on with line 251" in done.stderr
    assert take_all(broker, "t", "c").bodies == good
    done = run("pub", "t", instance=instance, stdin=bytes(1001))
    assert done.returncode == ERROR
    assert b"nothing was published" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_flushes_and_leaves_nothing_in_memory_when_told_to_stop(
    serve: Serve, attach: Attach, instance: str, data_path: Path, number: int
) -> None:
    server = serve()
    attach().producer("t").publish(b"x")
    assert server.kill(number) == OK
    assert "Traceback" not in server.errors
    assert not shm.list_objects(instance)
    assert sorted(path.name for path in data_path.glob("t.diskqueue*")) == [
        "t.diskqueue.000001.dat",
        "t.diskqueue.meta.dat",
    ]
    assert run("stat", instance=instance).returncode == NOT_RUNNING


def test_serve_refuses_a_name_or_a_data_path_that_is_in_use(
    serve: Serve, instance: str, new_instance: Callable[[], str], data_path: Path, tmp_path: Path
) -> None:
    server = serve()
    other = tmp_path / "other"
    other.mkdir()
    for name, path in ((instance, other), (new_instance(), data_path)):
        done = run("serve", f"--instance={name}", f"--data-path={path}", *NO_GATEWAY)
        assert done.returncode == ERROR
        assert b"Traceback" not in done.stderr
        assert b"running" in done.stderr or b"in use" in done.stderr or b"lock" in done.stderr
    assert answers(instance, server.pid)


def test_serve_takes_nsqds_flags_with_one_dash(instance: str, data_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "shmq",
        "serve",
        f"-data-path={data_path}",
        "-mem-queue-size=300",
        f"-instance={instance}",
        "-msg-timeout=2s",
        *NO_GATEWAY,
    ]
    server = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(instance, server.pid))
    finally:
        server.terminate()
        assert server.wait(30) == OK
