"""TensorBoard's event files, as far as scalars need: protobuf messages of a few fields, framed as TFRecords.

Sources: tensorflow/core/util/event.proto and summary.proto (Event: wall_time = 1, step = 2, file_version = 3, summary = 5;
Summary: value = 1; Value: tag = 1, simple_value = 2), tensorflow/core/lib/io/record_writer.cc and lib/hash/crc32c.h (length,
its masked CRC, data, its masked CRC, little-endian), protobuf.dev/programming-guides/encoding, RFC 3720 appendix B.4 (CRC32C).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

FILE_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_CRC = _table()


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC of `data`."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _CRC[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    """The CRC as TFRecords store it: rotated and shifted, so that the CRC of data that holds CRCs stays useful."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def version_event(wall_time: float) -> bytes:
    """The record that a file begins with."""
    return record(_double(1, wall_time) + _bytes(3, FILE_VERSION.encode()))


def scalar_event(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """The record of one step's scalars, by tag, in the order given; values are stored as float32, too large ones as infinite."""
    summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
    return record(_double(1, wall_time) + _key(2, _VARINT) + _varint(step) + _bytes(5, summary))


def _varint(value: int) -> bytes:
    """A number that is not negative, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _double(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _key(field, _FIXED32) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value
