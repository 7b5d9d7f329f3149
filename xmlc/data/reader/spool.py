"""Columns that grow on disk while a file is read, so that memory does not grow with the data."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from xmlc.data.rows import CsrRows, TextColumn

_BUFFER_BYTES = 1 << 20


class Scratch(ExitStack):
    """A folder for spools; leaving the context closes them, and what `Spool.finish` returned stays."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def spool(self, dtype: type[np.generic]) -> Spool:
        """Return a new spool in an unnamed file."""
        return Spool(self.enter_context(TemporaryFile(dir=self._folder, buffering=_BUFFER_BYTES)), dtype)


class Spool:
    """One growing array in a file."""

    def __init__(self, file: IO[bytes], dtype: type[np.generic]) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)
        self.size = 0

    def append(self, array: NDArray[Any]) -> None:
        """Append a one-dimensional array, converted to the spool's dtype."""
        self._file.write(np.ascontiguousarray(array, self._dtype).data)
        self.size += len(array)

    def append_bytes(self, data: bytes) -> None:
        """Append raw bytes of the spool's dtype."""
        self._file.write(data)
        self.size += len(data) // self._dtype.itemsize

    def finish(self) -> NDArray[Any]:
        """Return everything appended, memory-mapped; the space on disk goes when the array does."""
        self._file.flush()
        if not self.size:
            return np.empty(0, self._dtype)
        return np.asarray(np.memmap(self._file, self._dtype, "r", shape=(self.size,)))


class RowsSpool:
    """Growing compressed sparse rows."""

    def __init__(self, scratch: Scratch, columns: int, with_values: bool) -> None:
        self._columns = columns
        self._offsets = scratch.spool(np.int64)
        self._offsets.append(np.zeros(1, np.int64))
        self._indices = scratch.spool(np.int32)
        self._values = scratch.spool(np.float32) if with_values else None

    @property
    def rows(self) -> int:
        """Rows appended so far."""
        return self._offsets.size - 1

    def append(self, rows: CsrRows) -> None:
        """Append rows; their values are dropped where the spool has none."""
        self._offsets.append(rows.offsets[1:] + self._indices.size)
        self._indices.append(rows.indices)
        if self._values is not None:
            values = np.ones(len(rows.indices), np.float32) if rows.values is None else rows.values
            self._values.append(values)

    def finish(self) -> CsrRows:
        """Return everything appended, memory-mapped."""
        values = None if self._values is None else self._values.finish()
        return CsrRows(self._offsets.finish(), self._indices.finish(), values, self._columns)


class TextSpool:
    """Growing column of texts."""

    def __init__(self, scratch: Scratch) -> None:
        self._offsets = array("q", [0])
        self._data = scratch.spool(np.uint8)

    def append(self, text: str) -> None:
        """Append one text."""
        self._data.append_bytes(text.encode())
        self._offsets.append(self._data.size)

    def finish(self) -> TextColumn:
        """Return everything appended; the bytes are memory-mapped."""
        return TextColumn(np.frombuffer(self._offsets, np.int64), self._data.finish())
