"""A shmq is killed, another broker has the data path for a while, then shmq goes on with what is in
its shared memory: nothing is lost of what any of them had, though messages may come twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nsqd.compat.handover import ON_DISK, SMALL, files, numbered, publish, stop, take
from support.deliveries import take_all
from support.processes import Child, arm_server, eventually
from support.processes import serve as serve_child
from support.real_nsqd import Nsqd

import shmq

pytestmark = pytest.mark.peers

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]
Start = Callable[..., Nsqd]

ANOTHER = "another broker has used"


@pytest.fixture
def leave(serve: Serve, attach: Attach, data_path: Path) -> Callable[..., list[bytes]]:
    """`leave(how)`: a shmq with messages of channel t:c in memory and on disk ends by SIGKILL
    (`killed`) or with `--on-stop=keep`; the bodies that were not taken."""

    def left(how: str) -> list[bytes]:
        server = serve(on_stop="keep", **SMALL)
        broker = attach()
        broker.create_channel("t", "c")
        noted = data_path / "nsqd.dat"
        eventually(lambda: noted.exists() and '"c"' in noted.read_text())
        bodies = numbered(8000)
        publish(broker, "t", bodies)
        taken = take(broker, "t", "c", 700).bodies
        if how == "killed":
            server.kill()
        else:
            stop(server)
        return bodies[len(taken) :]

    return left


@pytest.mark.parametrize("left_by", ["killed", "keep"])
@pytest.mark.parametrize("nsqd_is", ["stopped", "killed"])
def test_what_nsqd_wrote_in_between_is_not_cut_off(
    left_by: str,
    nsqd_is: str,
    leave: Callable[..., list[bytes]],
    serve: Serve,
    attach: Attach,
    nsqd: Start,
    data_path: Path,
) -> None:
    bodies = leave(left_by)
    peer = nsqd(**ON_DISK)
    gone = peer.take("t", "c", 1500).bodies
    more, other = numbered(3000, 8000), numbered(500, 11000)
    peer.post("/topic/create?topic=u")
    peer.post("/channel/create?topic=u&channel=c")
    peer.post("/topic/create?topic=v")
    peer.publish("t", more)
    peer.publish("u", other)
    peer.publish("v", other)
    eventually(lambda: not any(peer.stats()[topic]["depth"] for topic in "tu"))
    peer.stop() if nsqd_is == "stopped" else peer.kill()

    server = serve(**SMALL)
    eventually(lambda: ANOTHER in server.errors)
    broker = attach()
    came = take_all(broker, "t", "c").bodies
    assert {*gone, *came} >= {*bodies, *more}
    if nsqd_is == "stopped":  # else how far it had read from its topic is lost with it
        assert [body for body in came if body in set(more)] == more, "each once, in order"
        assert take_all(broker, "u", "c").bodies == other
    else:
        assert {*take_all(broker, "u", "c").bodies} == {*other}
    assert take_all(broker, "v", "new").bodies == other
    assert files(data_path, "t:c").bad == []
    publish(broker, "t", more)
    server.kill()
    server = serve(**SMALL)
    assert take_all(broker, "t", "c").bodies == more, "each once: where it was holds again"
    assert ANOTHER not in server.errors


def test_files_that_begin_anew_are_read_from_their_beginning(
    leave: Callable[..., list[bytes]], serve: Serve, attach: Attach, nsqd: Start
) -> None:
    leave("killed")
    peer = nsqd(**ON_DISK)
    peer.post("/channel/delete?topic=t&channel=c")
    peer.post("/channel/create?topic=t&channel=c")
    more = numbered(3000, 8000)
    peer.publish("t", more)
    eventually(lambda: peer.channel("t", "c")["depth"] == len(more))
    peer.stop()
    server = serve(**SMALL)
    broker = attach()
    came = take_all(broker, "t", "c").bodies
    assert [body for body in came if body in set(more)] == more
    publish(broker, "t", more)
    stop(server)
    peer = nsqd(**ON_DISK)
    assert peer.take_all("t", "c").bodies == more


def test_a_shmq_of_another_name_is_another_broker(
    leave: Callable[..., list[bytes]],
    serve: Serve,
    attach: Attach,
    new_instance: Callable[[], str],
    data_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    bodies = leave("killed")
    name = new_instance()
    server = keep(serve_child(name, data_path, **SMALL))
    more, deferred = numbered(2000, 8000), numbered(300, 10000)
    with shmq.attach(name) as broker:
        publish(broker, "t", more)
        broker.producer("t").publish_many(deferred, defer=1.5)
    stop(server)
    server = serve(**SMALL)
    eventually(lambda: ANOTHER in server.errors)
    broker = attach()
    came: set[bytes] = set()
    wanted = {*bodies, *more, *deferred}
    with broker.consumer("t", "c") as consumer:
        while not came >= wanted:
            batch = consumer.take_many(200, timeout=10)
            assert batch, f"{len(came)} of {len(wanted)} came"
            came |= set(batch.bodies())
            batch.finish()


@pytest.mark.parametrize("nsqd_makes_it", [True, False])
def test_a_backlog_half_way_to_its_channel_is_found_where_its_files_are(
    nsqd_makes_it: bool,
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    nsqd: Start,
) -> None:
    server = serve(killpoint=("take_over.done", 1), **SMALL)
    broker = attach()
    bodies, more = numbered(5000), numbered(1000, 5000)
    publish(broker, "t", bodies)
    arm_server(server)
    with pytest.raises(shmq.NotRunning):
        broker.create_channel("t", "c")
    server.die()
    peer = nsqd(**ON_DISK)
    if nsqd_makes_it:
        peer.post("/channel/create?topic=t&channel=c")
    peer.publish("t", more)
    eventually(lambda: not (nsqd_makes_it and peer.stats()["t"]["depth"]))
    peer.stop()
    server = serve(**SMALL)
    eventually(lambda: ANOTHER in server.errors)
    came: set[bytes] = set()

    def all_came() -> bool:
        """The topic's backlog may still be on its way to the channel when that is empty."""
        came.update(take_all(broker, "t", "c").bodies)
        return came >= {*bodies, *more}

    eventually(all_came)
    assert came == {*bodies, *more}
