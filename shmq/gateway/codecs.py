"""The layers between a session and its socket: TLS, snappy, deflate. Bytes in, bytes out.

A layer returns its plain bytes in pieces, on request, so that a few compressed bytes cannot fill
the memory before the session has asked for them.
"""

from __future__ import annotations

import functools
import ssl
import zlib
from collections import deque
from typing import Any, Final, Protocol

from shmq.door.handshakes import tls_reason

_PIECE: Final = 65536  # bytes of plain data at a time
#: Compressed bytes that are accepted before the commands in the previous ones were executed. One
#: byte of deflate becomes at most 1032 plain bytes, so a client that disconnects leaves at most
#: some 16 MiB of commands.
PACKED: Final = 16384
_SNAPPY_START: Final = b"\xff\x06\x00\x00sNaPpY"
#: A chunk has at most 64 KiB of plain data; snappy may make that a sixth longer.
_SNAPPY_CHUNK: Final = 4 + 65536 + 65536 // 6 + 32


class LayerError(Exception):
    """The input is not valid for the layer. The text may be sent to the client."""


class Layer(Protocol):
    """Decodes the client's bytes with `push` and `pull`, and encodes the server's with `send`."""

    @property
    def ended(self) -> bool:
        """Whether the client has ended its stream; bytes after the end are ignored."""

    def push(self, data: bytes) -> None:
        """Add encoded bytes."""

    def pull(self) -> bytes:
        """Return some plain bytes; empty: push more first. Raises LayerError."""

    def send(self, data: bytes) -> bytes:
        """Encode plain bytes; the result is flushed, so the client can decode all of it."""


class Tls:
    """The server's side of TLS."""

    def __init__(self, context: ssl.SSLContext, until: float) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(self._in, self._out, server_side=True)
        self.ended = False
        self.until = until
        """When the handshake must be done."""

    def push(self, data: bytes) -> None:
        self._in.write(data)

    def handshake(self, is_last: bool, now: float) -> tuple[bool, bytes]:
        """Continue the handshake; return whether it is done, and bytes for the client.

        is_last: the client sends nothing more. Raises LayerError."""
        try:
            self.object.do_handshake()
            return True, self._out.read()
        except ssl.SSLWantReadError:
            if is_last or now >= self.until:
                raise LayerError("EOF" if is_last else "i/o timeout") from None
            return False, self._out.read()
        except (ssl.SSLError, OSError) as exc:
            raise LayerError(tls_reason(exc)) from None

    @property
    def version(self) -> str:
        """The version by nsqd's name: TLS1.0 ... TLS1.3."""
        version = (self.object.version() or "").replace("TLSv", "TLS")
        return version if "." in version else f"{version}.0"

    @property
    def cipher_suite(self) -> str:
        """The cipher suite by nsqd's name: Go's name of an older suite, else `Unknown <id>`."""
        cipher = self.object.cipher()
        name = cipher[0] if cipher else ""
        return _SUITES.get(name) or f"Unknown {_suite_numbers().get(name, 0)}"

    @property
    def subject(self) -> Any:
        """The subject of the client's certificate, which was verified, as `ssl` has it; empty
        without one."""
        return (self.object.getpeercert() or {}).get("subject", ())

    @property
    def common_name(self) -> str:
        """The common name of the client's certificate; empty without one."""
        names = [value for part in self.subject for key, value in part if key == "commonName"]
        return str(names[0]) if names else ""

    @property
    def alert(self) -> bytes:
        """The TLS alert to be sent to the client after a LayerError."""
        return self._out.read()

    def pull(self) -> bytes:
        try:
            data = self.object.read(_PIECE)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLZeroReturnError:
            data = b""
        except ssl.SSLError as exc:
            raise LayerError(tls_reason(exc)) from None
        self.ended = not data
        return data

    def send(self, data: bytes) -> bytes:
        view = memoryview(data)
        while view:
            view = view[self.object.write(view) :]
        return self._out.read()


_SUITES: Final = {
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-ECDSA-AES128-GCM-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-RSA-AES128-SHA": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "ECDHE-RSA-AES256-SHA": "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-SHA": "TLS_RSA_WITH_AES_256_CBC_SHA",
    "DES-CBC3-SHA": "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
}


@functools.cache
def _suite_numbers() -> dict[str, int]:
    """Return the number of each cipher suite, by OpenSSL's name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    return {suite["name"]: suite["id"] & 0xFFFF for suite in context.get_ciphers()}


class Deflate:
    """Raw RFC 1951, one stream per direction, flushed after every write."""

    def __init__(self, level: int) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
        self._decompressor = zlib.decompressobj(-15)
        self._in = b""

    @property
    def ended(self) -> bool:
        return self._decompressor.eof

    def push(self, data: bytes) -> None:
        self._in += data

    def pull(self) -> bytes:
        if self._decompressor.eof:  # zlib would keep all following bytes and copy them each time
            self._in = b""
            return b""
        try:
            plain = self._decompressor.decompress(self._in, _PIECE)
        except zlib.error as exc:
            raise LayerError(f"flate: corrupt input ({exc})") from None
        self._in = self._decompressor.unconsumed_tail
        return plain

    def send(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)


class Snappy:
    """Snappy's framing format; the client may restart its stream at any time."""

    def __init__(self) -> None:
        import cramjam

        self._snappy: Any = cramjam.snappy
        self._in = bytearray()
        self._started = False
        self.ended = False

    def push(self, data: bytes) -> None:
        self._in += data

    def pull(self) -> bytes:
        held = self._in
        while len(held) >= 4:
            kind, length = held[0], int.from_bytes(held[1:4], "little")
            if length > _SNAPPY_CHUNK or 0x02 <= kind <= 0x7F:
                raise LayerError("snappy: corrupt input")
            if len(held) < 4 + length:
                return b""
            chunk = bytes(held[: 4 + length])
            del held[: 4 + length]
            if kind == 0xFF and chunk != _SNAPPY_START:
                raise LayerError("snappy: corrupt input")
            if kind > 0x01:
                continue  # the start of a stream, padding, or a chunk that may be skipped
            try:
                plain = bytes(self._snappy.decompress(_SNAPPY_START + chunk))
            except Exception as exc:  # cramjam.DecompressionError, which has no stub
                raise LayerError(f"snappy: corrupt input ({exc})") from None
            if plain:
                return plain
        return b""

    def send(self, data: bytes) -> bytes:
        packed = bytes(self._snappy.compress(data))
        if self._started:
            return packed[len(_SNAPPY_START) :]
        self._started = True
        return packed


class Stack:
    """Layers over a socket, the lowest first."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self._raw: deque[bytes] = deque()

    @property
    def packed(self) -> bool:
        """Whether a layer compresses."""
        return any(not isinstance(layer, Tls) for layer in self.layers)

    @property
    def ended(self) -> bool:
        """Whether a layer's stream has ended: bytes that are pushed now have no effect."""
        return any(layer.ended for layer in self.layers)

    def push(self, data: bytes) -> None:
        """Add bytes from the socket."""
        self._raw.extend(data[at : at + PACKED] for at in range(0, len(data), PACKED))

    def pull(self) -> bytes:
        """Return plain bytes of the highest layer; empty: push more first. Raises LayerError."""
        return self._pull(len(self.layers))

    def _pull(self, height: int) -> bytes:
        if not height:
            return self._raw.popleft() if self._raw else b""
        layer = self.layers[height - 1]
        while not (data := layer.pull()):
            below = self._pull(height - 1)
            if not below:
                return b""
            layer.push(below)
        return data

    def send(self, data: bytes) -> bytes:
        """Encode plain bytes for the socket."""
        for layer in reversed(self.layers):
            data = layer.send(data)
        return data
