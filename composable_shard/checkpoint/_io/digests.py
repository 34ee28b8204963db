"""Checksums of files by blocks, so that a part of a file can be verified by reading only that part.

A file is split into blocks of 1 MiB; the last block may be smaller. The checksum of a file is the digest of its
concatenated block digests (a hash tree of two levels).
"""

import zlib
from collections.abc import Callable
from typing import Any

BLOCK = 1 << 20


def _xxh3(data: Any) -> bytes:
    import xxhash

    return xxhash.xxh3_64_digest(data)


def _crc32(data: Any) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


ALGORITHMS: dict[str, tuple[int, Callable[[Any], bytes]]] = {  # bytes of a digest, and the function that computes it
    "xxh3": (8, _xxh3),  # package xxhash
    "crc32": (4, _crc32),
}


def best() -> str:
    """The fastest installed algorithm."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "crc32"
    return "xxh3"


def digest(algorithm: str, data: Any) -> bytes:
    """The digest of bytes."""
    return ALGORITHMS[algorithm][1](data)


def file_checksum(algorithm: str, blocks: bytes) -> str:
    """The checksum of a file, in hexadecimal digits, from its blocks' digests."""
    return digest(algorithm, blocks).hex()


class Digester:
    """Computes the digests of a file's blocks from its bytes, passed in the order of the file."""

    def __init__(self, algorithm: str) -> None:
        self._digest = ALGORITHMS[algorithm][1]
        self._blocks: list[bytes] = []
        self._begun = bytearray()

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        if self._begun:
            missing = BLOCK - len(self._begun)
            self._begun += data[:missing]
            data = data[missing:]
            if len(self._begun) < BLOCK:
                return
            self._blocks.append(self._digest(self._begun))
            self._begun = bytearray()
        whole = len(data) - len(data) % BLOCK
        self._blocks += [self._digest(data[at : at + BLOCK]) for at in range(0, whole, BLOCK)]
        self._begun += data[whole:]

    def finish(self) -> bytes:
        """The concatenated digests of all blocks."""
        if self._begun:
            self._blocks.append(self._digest(self._begun))
            self._begun = bytearray()
        return b"".join(self._blocks)
