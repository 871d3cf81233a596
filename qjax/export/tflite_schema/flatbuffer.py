"""Reads flatbuffers and checks every step: no offset, no length and no count in the file is trusted.

A table is a position in the file with a table of field offsets before it; vectors and strings carry their length. Every
access is compared with the file's size, and every read is charged to a budget proportional to that size. So a small
file whose offsets all lead to one large vector cannot cost more than its bytes allow.

Source: the flatbuffers binary format (flatbuffers.dev/internals).
"""

import struct

import numpy as np

from qjax.export.read_errors import ReadError

_U16, _U32, _I32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")

SCALARS = {
    "bool": (1, struct.Struct("<B")),
    "i8": (1, struct.Struct("<b")),
    "u8": (1, struct.Struct("<B")),
    "i32": (4, _I32),
    "u32": (4, _U32),
    "u64": (8, struct.Struct("<Q")),
}


def damaged(what: str) -> ReadError:
    """The error for a file that breaks the format."""
    return ReadError(f"damaged .tflite file: {what}. Get the file again from where it came.")


class Bytes:
    """The file, and how much may still be read from it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.left = 16 * len(data) + 2**16

    def charge(self, size: int) -> None:
        """Count a read."""
        self.left -= size
        if self.left < 0:
            raise damaged("its tables refer to the same bytes again and again")

    def number(self, kind: struct.Struct, at: int) -> int:
        """A number at a place."""
        if not 0 <= at <= len(self.data) - kind.size:
            raise damaged(f"a number at byte {at} of {len(self.data)}")
        return kind.unpack_from(self.data, at)[0]

    def root(self, identifier: bytes) -> "Table":
        """The first table of a file of that kind."""
        if len(self.data) < 8 or self.data[4:8] != identifier:
            raise damaged(f"expected the identifier {identifier!r} at byte 4, got {bytes(self.data[4:8])!r}")
        return Table(self, self.number(_U32, 0))


class Table:
    """One table; fields are accessed by their number in the schema."""

    def __init__(self, file: Bytes, at: int) -> None:
        self._file, self._at = file, at
        fields = at - file.number(_I32, at)
        self._length = file.number(_U16, fields)
        size = file.number(_U16, fields + 2)
        inside = self._length >= 4 and fields + self._length <= len(file.data) and 4 <= size <= len(file.data) - at
        if not inside or self._length % 2:
            raise damaged(f"the table at byte {at} extends beyond the file")
        self._fields, self._size = fields, size
        file.charge(size + self._length)

    def _place(self, field: int, size: int) -> int | None:
        where = 4 + 2 * field
        if where + 2 > self._length:
            return None
        offset = self._file.number(_U16, self._fields + where)
        if offset and offset + size > self._size:
            raise damaged(f"field {field} of the table at byte {self._at} lies outside of it")
        return self._at + offset if offset else None

    @property
    def stored(self) -> list[int]:
        """The numbers of the fields that the file states, including those with the schema's default."""
        count = (self._length - 4) // 2
        return [n for n in range(count) if self._file.number(_U16, self._fields + 4 + 2 * n)]

    def scalar(self, field: int, kind: str, default: int = 0) -> int:
        """A number."""
        size, packed = SCALARS[kind]
        at = self._place(field, size)
        return default if at is None else self._file.number(packed, at)

    def _followed(self, field: int) -> int | None:
        at = self._place(field, 4)
        return None if at is None else at + self._file.number(_U32, at)

    def table(self, field: int) -> "Table | None":
        """A table, or None."""
        at = self._followed(field)
        return None if at is None else Table(self._file, at)

    def _vector(self, field: int, size: int) -> tuple[int, int] | None:
        """Where a vector's items begin, and how many there are."""
        at = self._followed(field)
        if at is None:
            return None
        count = self._file.number(_U32, at)
        if at + 4 + count * size > len(self._file.data):
            raise damaged(f"a vector of {count} items at byte {at} of {len(self._file.data)}")
        return at + 4, count

    def tables(self, field: int) -> "list[Table]":
        """A vector of tables."""
        found = self._vector(field, 4)
        if found is None:
            return []
        start, count = found
        self._file.charge(4 * count)
        places = range(start, start + 4 * count, 4)
        return [Table(self._file, at + self._file.number(_U32, at)) for at in places]

    def array(self, field: int, dtype: str) -> np.ndarray | None:
        """A vector of numbers, as a copy; None if the field is absent."""
        kind = np.dtype(dtype).newbyteorder("<")
        found = self._vector(field, kind.itemsize)
        if found is None:
            return None
        start, count = found
        self._file.charge(count * kind.itemsize)
        return np.frombuffer(self._file.data, kind, count, start).astype(dtype)

    def span(self, field: int) -> tuple[int, int] | None:
        """Where a vector of bytes begins and ends; it is not read yet."""
        found = self._vector(field, 1)
        return None if found is None else (found[0], found[0] + found[1])

    def text(self, field: int, limit: int = 1024) -> str:
        """A string, truncated to `limit` bytes; bytes that are not valid Unicode are replaced."""
        found = self.span(field)
        if found is None:
            return ""
        start, end = found
        end = min(end, start + limit)
        self._file.charge(end - start)
        return bytes(self._file.data[start:end]).decode("utf-8", "replace")
