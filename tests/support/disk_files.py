"""Records and bodies for tests of a queue's files."""

from __future__ import annotations

from shmq.storage import diskqueue_recovery as recovery
from shmq.storage.diskqueue import DamagedFile, DiskQueue
from shmq.storage.records import RECORD_OVERHEAD, Record, decode_records, encode_records

# written by nsqd 1.3.0: attempts 0, body x3
GOLDEN = bytes.fromhex("0000001c18e9c568cf6dc7a8000031386131663236326139613639303031") + b"x3"
GOLDEN_RECORD = Record(0x18E9C568CF6DC7A8, 0, b"18a1f262a9a69001", b"x3")
LIMIT = 1000  # max_msg_size of these tests


def records_of(bodies: list[bytes], first: int = 0) -> tuple[bytes, list[int]]:
    numbers = range(first, first + len(bodies))
    data = encode_records([1000 + n for n in numbers], [1] * len(bodies), list(numbers), bodies)
    return data, [RECORD_OVERHEAD + len(body) for body in bodies]


def put(queue: DiskQueue, position: int, bodies: list[bytes]) -> int:
    """Write bodies from a write position on; returns the new one."""
    data, lengths = records_of(bodies)
    positions = queue.plan(position, lengths)
    queue.write(data, positions, lengths, write_position=position)
    return int(positions[-1])


def take_all(
    queue: DiskQueue, read: int, write: int, max_bytes: int = 1 << 20
) -> tuple[list[bytes], list[DamagedFile]]:
    """Read to the end as the supervisor does, setting damaged files aside."""
    bodies: list[bytes] = []
    damages: list[DamagedFile] = []
    while True:
        try:
            chunk = queue.read(read, write, max_bytes)
        except DamagedFile as damage:
            damages.append(damage)
            recovery.set_aside(queue, damage.file)
            read = damage.next_position
            write = max(read, write)
            continue
        read = chunk.next_position
        queue.drop_before(read)
        if not chunk.count:
            assert read == write
            return bodies, damages
        bodies += [record.body for record in decode_records(chunk.data, queue.max_msg_size)]


def bodies_of(sizes: list[int]) -> list[bytes]:
    return [bytes([65 + i % 26]) * size for i, size in enumerate(sizes)]
