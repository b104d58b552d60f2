"""Results stores between processes: waiting, deaths, stops, starts, adoption, no room."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import HELPERS, Child, eventually, say, vanish

import shmq
from shmq.storage.results_file import ResultsFile

Spawn = Callable[..., Child]


def answer(instance):
    with shmq.attach(instance) as broker:
        store = broker.results("r")
        say("ready")
        for number in range(200):
            body = store.wait(f"question {number}", delete=True)
            store.set(f"answer {number}", body[::-1])
        say("done")


def test_another_process_waits_for_keys(instance: str, serve: Spawn, child: Spawn) -> None:
    serve()
    with shmq.attach(instance, timeout=30) as broker:
        store = broker.results("r")
        other = child(answer, instance)
        other.said("ready")
        for number in range(200):
            store.set(f"question {number}", b"%d." % number)
            assert store.wait(f"answer {number}", delete=True) == (b"%d." % number)[::-1]
        other.said("done")
        assert list(store) == []


def claim(instance, most):
    with shmq.attach(instance) as broker:
        store = broker.results("r")
        mine = [n for n in range(2000) if store.add(f"{n}", b"%d" % os.getpid())]  # noqa: F821
        taken = sum(store.incr("places", most=most) is not None for _ in range(2000))
        say("won", len(mine), taken)


def test_each_key_is_added_once_and_a_bound_holds(
    instance: str, serve: Spawn, child: Spawn
) -> None:
    serve()
    with shmq.attach(instance, timeout=30) as broker:
        store = broker.results("r")
        others = [child(claim, instance, 3000) for _ in range(3)]
        words = [other.said("won").split() for other in others]
        assert sum(int(word[1]) for word in words) == 2000
        assert sum(int(word[2]) for word in words) == 3000
        assert store.get("places") == b"3000"


def work_until_killed(instance, me):
    broker = shmq.attach(instance)
    store = broker.results("r")
    say("ready")
    for number in itertools.count():  # noqa: F821
        key, size = f"{me} {number % 20}", number % 3000
        store.set(key, b"%d:" % number + bytes([number % 256]) * size)
        store.incr("sum")
        if number % 7 == 0:
            store.delete(f"{me} {number % 11}")
        if number % 5 == 0:
            store.pop(f"{me} {number % 13}")


def counted(store: shmq.Results, most: int) -> None:
    eventually(lambda: int(store.get("sum", b"0")) > most)


@pytest.mark.timeout(300)
def test_a_killed_client_leaves_whole_values(
    instance: str, serve: Spawn, child: Spawn, keep: Callable[[shmq.Broker], shmq.Broker]
) -> None:
    serve()
    broker = keep(shmq.attach(instance, timeout=30))
    store = broker.results("r", max_keys=100, max_bytes=1 << 20)
    before = 0
    for round_ in range(12):
        workers = [child(work_until_killed, instance, f"{round_} {n}") for n in range(2)]
        for worker in workers:
            worker.said("ready")
        counted(store, before + 300)
        for worker in workers:
            worker.kill()
        for key, value in store.items():
            if key != b"sum":
                number, _, rest = value.partition(b":")
                assert rest == bytes([int(number) % 256]) * (int(number) % 3000)
        before = int(store.get("sum", b"0"))
        for key in store:
            if key != b"sum":
                store.delete(key)
        assert len(store) == 1


def die_waiting(instance):
    store = shmq.attach(instance).results("r")
    threading.Timer(0.05, vanish).start()  # noqa: F821
    say("ready")
    store.wait("never")


def test_a_waiter_that_dies_takes_no_wake_up_with_it(
    instance: str, serve: Spawn, child: Spawn, keep: Callable[[shmq.Broker], shmq.Broker]
) -> None:
    serve()
    store = keep(shmq.attach(instance, timeout=30)).results("r")
    child(die_waiting, instance).die()
    other = child(answer, instance)
    other.said("ready")
    for number in range(200):
        store.set(f"question {number}", b"%d." % number)
        assert store.wait(f"answer {number}") is not None


# ---- stops and starts ----


def test_a_stop_writes_what_is_there_and_a_start_reads_it(
    instance: str, serve: Spawn, data_path: Path
) -> None:
    server = serve()
    with shmq.attach(instance, timeout=30) as broker:
        store = broker.results("r", max_keys=5000, max_bytes=1 << 22)
        for number in range(3000):
            store.set(f"key {number}", b"%d" % number * 50)
        store.set("over", b"x", ttl=0.001)
        store.set("long", b"x", ttl=3600)
        broker.results("empty")
        broker.results("gone#ephemeral").set("a", b"b")
        server.kill(signal.SIGTERM)
        with pytest.raises(shmq.Gone):
            store.get("key 1")
    assert [path.name for path in data_path.glob("shmq.results*")] == ["shmq.results.r.dat"]
    serve()
    with shmq.attach(instance, timeout=30) as broker:
        assert broker.results_names() == ["r"]
        assert not list(data_path.glob("shmq.results*"))
        store = broker.results("r")
        stats = store.stats()
        assert (stats.keys, stats.max_keys, stats.max_bytes) == (3001, 5000, 1 << 22)
        assert all(store.get(f"key {n}") == b"%d" % n * 50 for n in range(3000))
        ttls = [ttl for key, _, ttl in store._scan(False) if key == b"long"]
        assert 3000e9 < ttls[0] < 3600e9


def test_a_supervisor_that_was_killed_is_followed_by_one_that_adopts(
    instance: str, serve: Spawn, data_path: Path
) -> None:
    server = serve()
    with shmq.attach(instance, timeout=30) as broker:
        store = broker.results("r")
        store.set("a", b"1")
        server.kill()
        store.set("b", b"2")  # nobody is needed
        ResultsFile(data_path, "r").write(1, 1 << 16, [(b"stale", b"x", 0)], 0o600)
        server = serve()
        eventually(broker.supervisor_alive)
        store.set("c", b"3", ttl=0.001)
        store.set("d", b"4")
        eventually(lambda: len(store) == 3)
        assert dict(store.items()) == {b"a": b"1", b"b": b"2", b"d": b"4"}
        assert dict(shmq.attach(instance).results("r").items()) == dict(store.items())
        eventually(lambda: not list(data_path.glob("shmq.results*")))
        broker.results("later").set("x", b"y")


def test_an_intact_part_of_a_damaged_file_is_read_and_the_file_is_kept(
    instance: str, serve: Spawn, data_path: Path
) -> None:
    file = ResultsFile(data_path, "r")
    file.write(100, 1 << 20, [(b"%d" % n, b"value %d" % n, 0) for n in range(50)], 0o600)
    whole = file.path.read_bytes()
    at = whole.index(b"value 30")
    file.path.write_bytes(whole[:at] + b"VALUE" + whole[at + 5 :])
    serve()
    with shmq.attach(instance, timeout=30) as broker:
        store = broker.results("r")
        assert len(store) == 30
        assert store.get("29") == b"value 29"
        assert broker.results_names() == ["r"]
    assert [path.name for path in data_path.glob("shmq.results*")] == ["shmq.results.r.dat.bad"]


# ---- no room ----


def mounted(path: Path | str, size: str) -> list[str]:
    """Words before a command: run it with a tmpfs of this size at `path`."""
    script = f'mount -t tmpfs -o size={size} tmpfs "{path}" && exec "$@"'
    return ["unshare", "-Urm", "sh", "-c", script, "sh"]


def fill_the_memory(data_path):
    with shmq.Broker(data_path=data_path, mem_queue_size=16) as broker:
        store = broker.results("r", max_bytes=1 << 30)
        store.set("first", b"old")
        stored = 0
        try:
            for number in range(1_000_000):
                store.set(f"{number}", bytes(10_000))
                stored += 1
        except shmq.Full as exc:
            say("full", exc)
        assert all(store.get(f"{n}") == bytes(10_000) for n in range(stored))
        assert store.get("first") == b"old"
        for number in range(stored):
            store.delete(f"{number}")
        store.set("first", b"new")
        store.set("again", bytes(10_000))
        say("goes on", stored, len(store))


def test_a_full_dev_shm_refuses_values_and_loses_none(child: Spawn, data_path: Path) -> None:
    filler = child(fill_the_memory, str(data_path), before=mounted("/dev/shm", "16m"), env=HELPERS)
    lines = filler.succeed()
    assert "enlarge /dev/shm" in lines[0]
    assert lines[1].startswith("goes on")
    assert int(lines[1].split()[2]) > 300


def fill_the_disk(instance, data_path):
    broker = shmq.Broker(data_path=data_path, instance=instance, mem_queue_size=16)
    store = broker.results("r", max_bytes=16 << 20)
    for number in range(1000):
        store.set(f"{number}", bytes(10_000))
    broker.close()
    say("closed", len([name for name in os.listdir("/dev/shm") if instance in name]))  # noqa: F821
    os.unlink(os.path.join(data_path, "ballast"))  # noqa: F821
    with shmq.Broker(data_path=data_path, instance=instance) as broker:
        store = broker.results("r")
        say("kept", len(store), sum(value == bytes(10_000) for _, value in store.items()))
        store.set("more", b"x")


def test_a_full_disk_at_a_stop_leaves_the_results_in_memory(
    child: Spawn, instance: str, tmp_path: Path
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    script = (
        f'mount -t tmpfs -o size=2m tmpfs "{disk}" && '
        f'head -c 500000 /dev/zero > "{disk}/ballast" && exec "$@"'
    )
    before = ["unshare", "-Urm", "sh", "-c", script, "sh"]
    lines = child(fill_the_disk, instance, str(disk), before=before).succeed()
    assert int(lines[0].split()[1]) > 2
    assert lines[1] == "kept 1000 1000"
