"""A client of a broker on another host, over its gateway: `shmq.connect("host:4150")`.

It is pure Python and needs the standard library alone, so it runs where the extension does not:
macOS, Windows, any processor. docs/fleet.md has the protocol.
"""

from __future__ import annotations

from shmq.remote.broker import RemoteBroker, connect
from shmq.remote.consumer import RemoteConsumer, RemoteMessage
from shmq.remote.counts import ChannelCounts
from shmq.remote.lease import RemoteLeaseHolder
from shmq.remote.producer import RemoteProducer
from shmq.remote.rows import RemoteBatch
from shmq.remote.writer import Staged

__all__ = [
    "ChannelCounts",
    "RemoteBatch",
    "RemoteBroker",
    "RemoteConsumer",
    "RemoteLeaseHolder",
    "RemoteMessage",
    "RemoteProducer",
    "Staged",
    "connect",
]
