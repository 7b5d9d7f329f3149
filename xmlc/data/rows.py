"""Ragged columns: compressed sparse rows and UTF-8 texts, in memory or memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmlc.errors import DataError

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

_TEXTS_PER_READ = 4096


@dataclass(frozen=True, eq=False)
class CsrRows:
    """A sparse matrix [row, column] by compressed rows; columns ascend within a row and occur once."""

    offsets: Int64  # [row + 1]
    indices: NDArray[np.int32]  # [nonzero]
    values: Float32 | None  # [nonzero]; None: every stored value is 1
    columns: int

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included."""
        return len(self.offsets) - 1

    def take(self, rows: Int64) -> CsrRows:
        """Return the given rows, in their order, as a copy."""
        offsets, positions = _gather(self.offsets, rows)
        values = None if self.values is None else self.values[positions]
        return CsrRows(offsets, self.indices[positions], values, self.columns)

    def head(self, rows: int) -> CsrRows:
        """Return the first rows, sharing memory."""
        end = int(self.offsets[rows])
        values = None if self.values is None else self.values[:end]
        return CsrRows(self.offsets[: rows + 1], self.indices[:end], values, self.columns)

    @classmethod
    def empty(cls, rows: int, columns: int) -> CsrRows:
        """Return a matrix without entries."""
        return cls(np.zeros(rows + 1, np.int64), np.empty(0, np.int32), None, columns)

    @property
    def entry_rows(self) -> Int64:
        """The row of every entry. [nonzero]"""
        return np.repeat(np.arange(self.rows), np.diff(self.offsets))

    def keep(self, kept: NDArray[np.bool_]) -> CsrRows:
        """Return the matrix with some of its entries, ``kept`` [nonzero]."""
        values = None if self.values is None else self.values[kept]
        return CsrRows(offsets_of(kept)[self.offsets], self.indices[kept], values, self.columns)

    def without(self, pairs: CsrRows) -> CsrRows:
        """Return the matrix without the entries that ``pairs`` [row, column] holds."""
        own = self.entry_rows * self.columns + self.indices
        return self.keep(~np.isin(own, pairs.entry_rows * self.columns + pairs.indices))

    def transposed(self) -> CsrRows:
        """Return the matrix as [column, row], with values."""
        matrix = self.to_scipy().T.tocsr()
        indices = matrix.indices.astype(np.int32, copy=False)  # int64 where there are 2^31 entries
        return CsrRows(matrix.indptr.astype(np.int64), indices, matrix.data, self.rows)

    def to_scipy(self) -> scipy.sparse.csr_matrix:
        """Return a float32 ``scipy.sparse.csr_matrix`` [row, column]."""
        values = np.ones(len(self.indices), np.float32) if self.values is None else self.values
        return scipy.sparse.csr_matrix((values, self.indices, self.offsets), shape=(self.rows, self.columns))

    @classmethod
    def from_scipy(cls, matrix: scipy.sparse.sparray | scipy.sparse.spmatrix, where: str) -> CsrRows:
        """Copy a SciPy sparse matrix; repeated entries are summed, columns sorted.

        Args:
            matrix: [row, column], any sparse format, any real dtype.
            where: Names the matrix in errors.

        Raises:
            DataError: An index is out of range, a value is not finite in float32, or not real.
        """
        if matrix.ndim != 2:
            raise DataError(f"{where}: must have two axes, [row, column], found shape {list(matrix.shape)}")
        if matrix.dtype.kind not in "biuf":
            raise DataError(f"{where}: values must be real numbers, found dtype {matrix.dtype}; convert them")
        rows = scipy.sparse.csr_array(matrix, copy=True)
        try:
            rows.check_format(full_check=True)
            if (np.diff(rows.indptr) < 0).any():  # unseen by SciPy where the last one is not above 0
                raise ValueError("index pointer values must not fall")
        except ValueError as error:
            raise DataError(
                f"{where}: must be a valid sparse matrix, found: {error}; write it anew"
            ) from None
        if rows.shape[1] > np.iinfo(np.int32).max:
            raise DataError(f"{where}: must have at most 2^31 - 1 columns, found {rows.shape[1]}")
        rows.sum_duplicates()
        with np.errstate(over="ignore"):
            values = rows.data.astype(np.float32)
        finite = np.isfinite(values)
        if not finite.all():
            row = row_of(rows.indptr, int(np.argmin(finite)))
            raise DataError(
                f"{where}: values must be finite in float32, found {rows.data[~finite][0]} in row {row}; "
                "remove or correct it"
            )
        return cls(rows.indptr.astype(np.int64), rows.indices.astype(np.int32), values, rows.shape[1])


@dataclass(frozen=True, eq=False)
class TextColumn:
    """Strings as one UTF-8 blob; reads one at a time, so that a memory-mapped column stays on disk."""

    offsets: Int64  # [row + 1], in bytes
    data: NDArray[np.uint8]  # [byte]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str:
        if not 0 <= row < len(self):
            raise IndexError(f"text {row} of {len(self)}")
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for blob in self.blobs():
            yield blob.decode()

    def blobs(self) -> Iterator[bytes]:
        """Yield every text as its UTF-8 bytes."""
        for first in range(0, len(self), _TEXTS_PER_READ):
            offsets = self.offsets[first : first + _TEXTS_PER_READ + 1].tolist()
            block = self.data[offsets[0] : offsets[-1]].tobytes()
            for start, end in pairwise(offsets):
                yield block[start - offsets[0] : end - offsets[0]]

    def take(self, rows: Int64) -> TextColumn:
        """Return the given texts, in their order, as a copy."""
        starts, ends = self.offsets[rows], self.offsets[rows + 1]
        view = memoryview(np.ascontiguousarray(self.data))
        data = b"".join([view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        return TextColumn(offsets_of(ends - starts), np.frombuffer(data, np.uint8))

    @classmethod
    def from_strings(cls, texts: Iterable[str]) -> TextColumn:
        """Encode strings; a lone surrogate is a ``UnicodeEncodeError``."""
        blobs = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, blobs), np.int64, len(blobs))
        return cls(offsets_of(lengths), np.frombuffer(b"".join(blobs), np.uint8))


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Texts as ragged rows of token ids; may be memory-mapped."""

    offsets: Int64  # [text + 1]
    ids: NDArray[Any]  # uint16 or int32 [token]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def head(self, rows: int) -> TokenRows:
        """Return the first texts, sharing memory."""
        return TokenRows(self.offsets[: rows + 1], self.ids[: self.offsets[rows]])

    @property
    def lengths(self) -> Int64:
        """Tokens of every text. [text]"""
        return np.diff(self.offsets)

    def take(self, rows: Int64) -> TokenRows:
        """Return the given texts, in their order, as a copy."""
        offsets, positions = _gather(self.offsets, rows)
        return TokenRows(offsets, self.ids[positions])


def concatenate_rows(parts: Sequence[CsrRows], columns: int) -> CsrRows:
    """Return the rows of all parts, one below the other; values where a part has some."""
    offsets = [np.zeros(1, np.int64)]
    for part in parts:
        offsets.append(part.offsets[1:] + offsets[-1][-1])
    indices = [np.empty(0, np.int32), *(part.indices for part in parts)]
    values = None
    if not parts or any(part.values is not None for part in parts):
        ones = (
            np.ones(len(part.indices), np.float32) if part.values is None else part.values for part in parts
        )
        values = np.concatenate([np.empty(0, np.float32), *ones])
    return CsrRows(np.concatenate(offsets), np.concatenate(indices), values, columns)


def row_of(offsets: Int64, entry: int) -> int:
    """Return the row that an entry lies in."""
    return int(np.searchsorted(offsets, entry, side="right")) - 1


def unit_length(rows: CsrRows) -> CsrRows:
    """Return the rows scaled to Euclidean length 1; a row of zeros stays as it is."""
    values = np.ones(len(rows.indices), np.float32) if rows.values is None else rows.values
    lengths = np.sqrt(segment_sums(np.square(values, dtype=np.float64), rows.offsets))
    scale = np.divide(1.0, lengths, out=np.ones_like(lengths), where=lengths > 0)
    return replace(rows, values=(values * np.repeat(scale, np.diff(rows.offsets))).astype(np.float32))


def segment_sums(values: NDArray[np.float64], offsets: Int64) -> NDArray[np.float64]:
    """Sum ``values[offsets[r]:offsets[r + 1]]`` for every r; an empty segment gives 0."""
    sums = np.zeros(len(offsets) - 1)
    filled = offsets[1:] > offsets[:-1]
    if filled.any():
        sums[filled] = np.add.reduceat(values, offsets[:-1][filled])
    return sums


def _gather(offsets: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Return the offsets of the gathered rows and the source position of each of their entries."""
    starts = offsets[rows]
    gathered = offsets_of(offsets[rows + 1] - starts)
    shift = np.repeat(starts - gathered[:-1], np.diff(gathered))
    return gathered, shift + np.arange(gathered[-1])


def offsets_of(lengths: NDArray[Any]) -> Int64:
    """Return where rows of these lengths begin, and behind them where the last one ends. [row + 1]"""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
