"""Writes tests/fuzz/corpus: small inputs to begin with, of each target; and a hand for new ones."""

from __future__ import annotations

from pathlib import Path

from shmq.storage import deferred
from shmq.storage.records import encode_records

CORPUS = Path(__file__).parent / "corpus"

RECORDS = encode_records(
    [1, 1767225600000000000], [0, 3], [b"0" * 16, 0x123456789ABCDEF0], [b"x", b"body " * 8]
)
CHUNK = deferred.encode([(5, RECORDS[:31]), (7, RECORDS[31:])], 2)
TOPICS = (
    b'{"topics":[{"name":"t","paused":true,"channels":[{"name":"c","paused":false},'
    b'{"name":"d#ephemeral"}]},{"name":"u","channels":null}],"version":"1.3.0"}'
)
SETTINGS = (
    b'{"id_clock":{"clock":5,"needs":"x"},"settings":{"t":{"settings":{"max_attempts":"3",'
    b'"retry_delay":"1s..5m"},"channels":{"c":{"max_messages":"10","overflow":"block"},'
    b'"d":{"message_ttl":"1h15m","dead_letter":"e","expired_to_dead":"true","max_bytes":"none"}}}}}'
)
NUMBERS = b'{"settings":{"t":{"channels":{"c":{"message_ttl":5,"max_attempts":null}}}}}'
RESULTS = (  # its checksums are 0
    b"shmqres1\0\0\0\5\0\0\0\0\0\1\0\0\0\0\0\0"
    b"\0\0\0\0\0\0\0\0\0\0\0\7\0\0\0\2\3keyxy"
    b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\0\1"
)
BLOCK = b"\3key\2\0xy\7shmq-me\1\0z"

# a word's place and value: region 8 (the queue's header), word 128 (ready_tail), 0x5a5a5a5a
WORD = bytes([8, 128, 0]) + b"\x5a" * 4
STORE_CALLS = [byte for call in range(11) for byte in (call, 33)]  # each, on key 33

CUT, BYTES = b"\x20\x55\x80\xd0", b"\0\0\0\0"
PUBLISH = b"PUB t\n\0\0\0\1xDPUB t 5\n\0\0\0\2xyMPUB t\n\0\0\0\x0d\0\0\0\2\0\0\0\1a\0\0\0\0"
LEASES = b'IDENTIFY\n\0\0\0\x2a{"feature_negotiation":true,"leases":true}'
CONSUME = (
    b"IDENTIFY\n\0\0\0\x1e" + b'{"feature_negotiation": true}\n' + b"SUB t c\nRDY 1\r\nNOP\n"
    b"FIN 0123456789abcdef\nFIN 0123456789abcdef\nFIN 0123456789ABCDEF\n"
    b"REQ 0123456789abcdef 5\nTOUCH 0123456789abcdef\nRDY 99999999999999999999\nCLS\n"
)

INPUTS: dict[str, dict[str, bytes]] = {
    "record": {"two": RECORDS, "cut": RECORDS[:40], "impossible": b"\0\0\0\1" + RECORDS},
    "meta": {"two": b"2\n0,0\n1,140\n", "spaces": b" -1\r\n+1, 5\r\n 2,7", "none": b""},
    "metadata": {"nsqd": TOPICS, "null": b"null", "empty": b"{}", "deep": b"[" * 2000},
    "reserve": {"clock": b'{"id_clock":123456789}', "null": b"null"},
    "chunk": {"two": CHUNK, "cut": CHUNK[:-20], "flipped": CHUNK[:60] + b"?" + CHUNK[61:]},
    "settings": {
        "two": SETTINGS,
        "numbers": NUMBERS,
        "large": NUMBERS.replace(b"5", b"5" * 400),
        "list": b'{"settings":[]}',
    },
    "results": {"one": RESULTS, "cut": RESULTS[:-9], "count": RESULTS[:-1] + b"\2"},
    "properties": {
        "two": BLOCK,
        "own": BLOCK[:8],
        "cut": BLOCK[:-1],
        "envelope": bytes([len(BLOCK), 0, 0, 0]) + BLOCK + b"body",
        "magic": b"\xf5shmqp\1\n" + bytes([8, 0, 0, 0]) + BLOCK,
    },
    "open": {"directory": b"\0\x80\0" + b"\xff" * 8, "queue": b"\1\x80\0" + b"\xff" * 16},
    "session": {
        "publish": CUT + PUBLISH,
        "consume": CUT + CONSUME,
        "bytes": BYTES + PUBLISH + CONSUME,
        "auth": CUT + b"AUTH\n\0\0\0\2xy",
        "closed": CUT + b"SUB t c\nCLS\nRDY 5\nCLS\n",
        "read": CUT + LEASES + b'LREAD t c\n\0\0\0\x1d{"lease":1,"credit":99999999}',
        "lease": CUT
        + LEASES
        + b'LEASE t c\n\0\0\0\x33{"n":1,"holder":[1,"0000000000000002"],"timeout":1}',
        "hold": CUT + LEASES + b'LHOLD t c\n\0\0\0\x19{"name":"x","ttl":null,"x"}',
        "stage": CUT + LEASES + b"STAGE t\n\0\0\0\x06\0\0\0\2{}",
    },
    "access": {
        "all": bytes(range(0, 250, 3)),
        "one": b"\1\1\xff\0\0\1\x04\1\2\1\0\1" + bytes(range(80)),
    },
    "requests": {
        "all": bytes(range(0, 250, 3)),
        "one": b"\1\1\xff\0\0\1\x20\1\2\1\0\1" + bytes(range(80)),
    },
    "wire": {
        "bodies": b"\0\0\0\0\1x\0\0\0\3abc",
        "bad": b"\5\0\0\0\1x\xff\xff\xff\xff",
        "publish": b"\7" + b"PUB t\n\0\0\0\1x" * 8,
        "finish": b"\6" + b"FIN 0123456789abcdef\n" * 5,
    },
    "store": {
        "nothing": bytes([0, *STORE_CALLS]),
        "one": bytes([1]) + WORD + bytes(STORE_CALLS),
        "repaired": bytes([0x81, 4, 0, 0]) + b"\x5a" * 4 + bytes(STORE_CALLS),
    },
    "use": {"nothing": bytes([0, *range(21)]), "one": bytes([1]) + WORD + bytes(range(21))},
}


def main() -> None:
    for target, inputs in INPUTS.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (CORPUS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
