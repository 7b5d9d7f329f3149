"""Lines of ``index:value`` pairs, with or without a leading label field, and filter pairs.

Two parsers read the same language. `_parse_block` takes many lines at once by array operations and gives up
on anything that is not plainly right; `_parse_line` takes one line and says what is wrong with it. Whatever
the first gives up on, the second reads, so that every error names its line and clean data is fast.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmlc.data.reader.files import IndexBase, Reading, line_blocks, shorten
from xmlc.data.reader.spool import RowsSpool, Scratch
from xmlc.data.rows import CsrRows, Int64
from xmlc.errors import DataError

_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LONGEST_INTEGER = 10  # digits: all of int32, and far from the end of int64
INT32_MAX = 2**31 - 1


def _byte_set(members: bytes) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(members)] = True
    return table


_BLANK = _byte_set(b" \t\r\n\v\f")
_NUMERIC_OR_BLANK = _BLANK | _byte_set(b"0123456789+-.eE")
_NEWLINE, _COLON, _COMMA, _ZERO = b"\n:,0"


@dataclass(frozen=True)
class Layout:
    """What one file promises about its lines."""

    path: Path
    rows: int
    columns: int
    labels: int | None
    """Number of labels where each line starts with a label field; None where it does not."""
    noun: str = "feature"
    """What a column is."""
    base: IndexBase = field(default_factory=IndexBase)

    @property
    def first_column(self) -> int:
        """The index that the file gives the first column."""
        return self.base.labels if self.noun == "label" else self.base.features


def read_header(path: Path, names: tuple[str, ...]) -> tuple[int, ...]:
    """Read the first line: one whole number for each of ``names``.

    Raises:
        DataError: The file is empty, or the line holds something else.
    """
    first = next((block.partition(b"\n")[0] for _, block in line_blocks(path)), b"")
    fields = first.split()
    if len(fields) != len(names) or not all(_is_count(field) for field in fields):
        raise DataError(
            f"{path}:1: the header must be {len(names)} whole numbers below 2^31, '{' '.join(names)}', found "
            f"{shorten(first)}; add or correct it"
        )
    return tuple(int(field) for field in fields)


def read_rows(layout: Layout, scratch: Scratch, reading: Reading) -> tuple[CsrRows, CsrRows | None]:
    """Read the lines after the header.

    Returns:
        Features [row, column] with values; labels [row, label] without, None where lines have no label field.

    Raises:
        DataError: A line is malformed, an index out of range, a value not finite, or there are more or fewer
            lines than the header promises.
    """
    features = RowsSpool(scratch, layout.columns, with_values=True)
    labels = RowsSpool(scratch, layout.labels or 0, with_values=False)
    for line, block in line_blocks(layout.path):
        body, body_line = (block.partition(b"\n")[2], 2) if line == 1 else (block, line)
        body = _without_surplus(layout, body, body_line, layout.rows - features.rows)
        if not body:
            continue
        feature_part, label_part = _parse_block(body, layout) or _parse_lines(
            body, body_line, layout, reading
        )
        feature_part, repeats = _canonical(feature_part)
        for error in _overflows(feature_part, str(layout.path), body_line):
            reading.refuse(error)
        reading.features += repeats
        features.append(feature_part)
        if label_part is not None:
            label_part, repeats = _canonical(label_part)
            reading.labels += repeats
            labels.append(label_part)
    if features.rows < layout.rows:
        raise DataError(
            f"{layout.path}: the header promises {layout.rows} rows, found {features.rows} lines after it; "
            "correct the header or copy the file again"
        )
    return features.finish(), None if layout.labels is None else labels.finish()


def parse_features(
    tokens: list[bytes],
    where: str,
    columns: int,
    form: str = "index:value",
    noun: str = "feature",
    first: int = 0,
) -> tuple[list[int], list[float]]:
    """Return indices and values of the ``index:value`` tokens of one line.

    Args:
        tokens: The line, cut at blanks.
        where: Names the line in errors.
        columns: The indices are below ``first + columns``.
        form: Describes a right token in errors.
        noun: What a column is.
        first: Index of the first column; it is returned as 0.

    Raises:
        DataError: A token is something else, an index is out of range, or a value not finite in float32.
    """
    indices, values = [], []
    for token in tokens:
        index, colon, value = token.partition(b":")
        if not colon or not index or not value:
            raise DataError(f"{where}: a {noun} must be {form}, found {shorten(token)}; correct the line")
        indices.append(_parse_index(where, f"a {noun} index", index, columns, first))
        if not _NUMBER.fullmatch(value) or _finite_float32(np.array([float(value)])) is None:
            raise DataError(
                f"{where}: a value must be a number finite in float32, found {shorten(token)}; "
                "correct or remove it"
            )
        values.append(float(value))
    return indices, values


def sum_repeats(rows: CsrRows, source: str, line: int) -> tuple[CsrRows, int]:
    """Sort each row's features and sum repeats; return also how many entries that saved.

    Args:
        rows: With values, one row for each line.
        source: Names the file in errors.
        line: Number of the first row's line.

    Raises:
        DataError: A sum leaves float32.
    """
    merged, repeats = _canonical(rows)
    for error in _overflows(merged, source, line):
        raise error
    return merged, repeats


def _overflows(merged: CsrRows, source: str, line: int) -> Iterator[DataError]:
    assert merged.values is not None
    finite = np.isfinite(merged.values)
    if finite.all():
        return
    rows = np.searchsorted(merged.offsets, np.flatnonzero(~finite), side="right") - 1
    for row in np.unique(rows):
        yield DataError(
            f"{source}:{line + row}: the sum of a repeated feature must be finite in float32, found an "
            "overflow; keep one of the repeats"
        )


def read_pairs(path: Path, instances: int, labels: int, reading: Reading) -> CsrRows:
    """Read a filter file, one ``instance label`` per line in any order, as rows [instance, label].

    Raises:
        DataError: A line is no pair of whole numbers, or one of them is out of range.
    """
    found = pair_array(path, instances, labels, reading)
    keys = found[0] * labels + found[1]
    unique = np.unique(keys)
    reading.pairs += len(keys) - len(unique)
    offsets = np.searchsorted(unique, np.arange(instances + 1) * labels)
    return CsrRows(offsets, (unique % max(labels, 1)).astype(np.int32), None, labels)


def pair_array(path: Path, instances: int, labels: int, reading: Reading) -> Int64:
    """Return the pairs of a filter file in their order, [2, pair].

    Raises:
        DataError: As `read_pairs`.
    """
    blocks = [np.empty((2, 0), np.int64)]
    for line, block in line_blocks(path):
        pairs = _parse_pair_block(block, instances, labels, reading.base)
        blocks.append(
            _parse_pair_lines(path, block, line, instances, labels, reading) if pairs is None else pairs
        )
    return np.concatenate(blocks, axis=1)


def _is_count(field: bytes) -> bool:
    return field.isdigit() and len(field) <= _LONGEST_INTEGER and int(field) <= INT32_MAX


def _without_surplus(layout: Layout, body: bytes, line: int, expected: int) -> bytes:
    """Cut the lines beyond the ``expected`` ones, which must be blank."""
    if body.count(b"\n") <= expected:
        return body
    split = body.split(b"\n")
    for number, text in enumerate(split[expected:], line + expected):
        if text.strip():
            raise DataError(
                f"{layout.path}:{number}: the header promises {layout.rows} rows, found more: "
                f"{shorten(text)}; correct the header"
            )
    return b"".join(text + b"\n" for text in split[:expected])


def _parse_block(block: bytes, layout: Layout) -> tuple[CsrRows, CsrRows | None] | None:
    """Parse whole lines at once; None for anything that is not plainly right."""
    text = np.frombuffer(block, np.uint8)
    starts, ends = _tokens(text)
    line_ends = np.flatnonzero(text == _NEWLINE)
    colons = np.flatnonzero(text == _COLON)

    label_rows = None
    if layout.labels is not None:
        first = np.flatnonzero((starts == 0) | (text[starts - 1] == _NEWLINE))
        no_colon = np.searchsorted(colons, starts[first]) == np.searchsorted(colons, ends[first])
        is_field = np.zeros(len(starts), np.bool_)
        is_field[first[no_colon]] = True
        label_rows = _parse_label_fields(
            text, starts[is_field], ends[is_field], line_ends, layout.labels, layout.base.labels
        )
        if label_rows is None:
            return None
        starts, ends = starts[~is_field], ends[~is_field]

    # As many tokens as colons, and each colon strictly inside its token: one colon in every token.
    if len(starts) != len(colons) or not ((starts < colons) & (colons < ends - 1)).all():
        return None
    indices = _parse_integers(text, starts, colons, layout.columns, layout.first_column)
    values = _parse_values(text, colons + 1, ends)
    if indices is None or values is None:
        return None
    return CsrRows(_offsets_of(starts, line_ends), indices, values, layout.columns), label_rows


def _tokens(text: NDArray[np.uint8]) -> tuple[Int64, Int64]:
    """Return start and end of every run of non-blank bytes; the text ends with a newline."""
    filled = np.zeros(len(text) + 1, np.bool_)
    np.logical_not(_BLANK[text], out=filled[1:])
    edges = np.flatnonzero(filled[1:] != filled[:-1])
    return edges[::2], edges[1::2]


def _offsets_of(starts: Int64, line_ends: Int64) -> Int64:
    return np.concatenate(([0], np.searchsorted(starts, line_ends)))


def _parse_label_fields(
    text: NDArray[np.uint8], starts: Int64, ends: Int64, line_ends: Int64, labels: int, base: int
) -> CsrRows | None:
    """Parse the comma-separated fields [start, end), at most one of them in a line."""
    commas = np.flatnonzero(text == _COMMA)
    if (np.searchsorted(commas, ends) - np.searchsorted(commas, starts)).sum() != len(commas):
        return None
    starts = np.sort(np.concatenate((starts, commas + 1)))
    ends = np.sort(np.concatenate((ends, commas)))
    indices = _parse_integers(text, starts, ends, labels, base)
    return None if indices is None else CsrRows(_offsets_of(starts, line_ends), indices, None, labels)


def _parse_integers(text: NDArray[np.uint8], starts: Int64, ends: Int64, limit: int, first: int) -> Any:
    """Parse [start, end) less ``first`` as int32 [token] in [0, limit); None where one is anything else."""
    lengths = ends - starts
    if not len(lengths):
        return np.empty(0, np.int32)
    if lengths.min() < 1 or lengths.max() > _LONGEST_INTEGER:
        return None
    numbers = np.zeros(len(starts), np.int64)
    for place in range(int(lengths.max())):
        digits = text[np.maximum(ends - 1 - place, starts)] - np.uint8(_ZERO)
        if (digits > 9).any():
            return None
        # int64 first: NumPy 1 would multiply in the digits' uint8.
        numbers += np.where(place < lengths, digits.astype(np.int64) * 10**place, 0)
    numbers -= first
    return numbers.astype(np.int32) if numbers.min() >= 0 and numbers.max() < limit else None


def _parse_values(text: NDArray[np.uint8], starts: Int64, ends: Int64) -> Any:
    """Parse [start, end) as finite float32 [token]; None where one is anything else."""
    if not len(starts):
        return np.empty(0, np.float32)
    steps = np.zeros(len(text) + 1, np.int8)
    steps[starts] = 1
    steps[ends + 1] = -1  # each token with the blank after it
    tokens = text[np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)]
    if not _NUMERIC_OR_BLANK[tokens].all():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # how NumPy up to 2.2 refuses text
        try:
            values = np.fromstring(tokens.tobytes(), sep=" ")
        except (ValueError, DeprecationWarning):
            return None
    # A token can hold two numbers for this parser ("1.5.5") but never none, so equal counts mean one each.
    return _finite_float32(values) if len(values) == len(starts) else None


def _finite_float32(values: NDArray[np.float64]) -> Any:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.isfinite(narrow).all() else None


def _parse_lines(body: bytes, line: int, layout: Layout, reading: Reading) -> tuple[CsrRows, CsrRows | None]:
    """Parse line by line."""
    label_counts, labels = [0], list[int]()
    counts, indices, values = [0], list[int](), list[float]()
    for number, raw in enumerate(body[:-1].split(b"\n"), line):
        try:
            line_labels, line_indices, line_values = _parse_line(raw, f"{layout.path}:{number}", layout)
        except DataError as error:
            reading.refuse(error)
        else:
            labels += line_labels
            indices += line_indices
            values += line_values
        label_counts.append(len(labels))
        counts.append(len(indices))
    features = CsrRows(
        np.array(counts), np.array(indices, np.int32), np.array(values, np.float32), layout.columns
    )
    if layout.labels is None:
        return features, None
    return features, CsrRows(np.array(label_counts), np.array(labels, np.int32), None, layout.labels)


def _parse_line(raw: bytes, where: str, layout: Layout) -> tuple[list[int], list[int], list[float]]:
    tokens = raw.split()
    labels = []
    if layout.labels is not None and tokens and b":" not in tokens[0] and raw.startswith(tokens[0]):
        labels = [
            _parse_index(where, "a label", each, layout.labels, layout.base.labels)
            for each in tokens.pop(0).split(b",")
        ]
    form = (
        "index:value" if layout.labels is None else "index:value after labels joined by commas without blanks"
    )
    indices, values = parse_features(tokens, where, layout.columns, form, layout.noun, layout.first_column)
    return labels, indices, values


def _parse_index(where: str, what: str, digits: bytes, limit: int, first: int) -> int:
    last = limit - 1 + first
    if not digits.isdigit():
        raise DataError(
            f"{where}: {what} must be a whole number from {first} to {last}, found {shorten(digits)}; "
            "correct the line"
        )
    if len(digits) > 18 or int(digits) > last:
        other = "; where they count from 1, pass --index-base 1 to `xmlc data convert`" * (first == 0)
        raise DataError(
            f"{where}: {what} must be at most {last}, found {shorten(digits)}; indices count from {first}: "
            f"correct the line or the header{other}"
        )
    if int(digits) < first:
        raise DataError(
            f"{where}: {what} must be at least {first}, found {shorten(digits)}; correct --index-base or the "
            "line"
        )
    return int(digits) - first


def _parse_pair_block(block: bytes, instances: int, labels: int, base: IndexBase) -> Int64 | None:
    text = np.frombuffer(block, np.uint8)
    starts, ends = _tokens(text)
    counts = np.diff(_offsets_of(starts, np.flatnonzero(text == _NEWLINE)))
    if not ((counts == 0) | (counts == 2)).all():
        return None
    rows = _parse_integers(text, starts[::2], ends[::2], instances, base.instances)
    columns = _parse_integers(text, starts[1::2], ends[1::2], labels, base.labels)
    return None if rows is None or columns is None else np.array([rows, columns], np.int64)


def _parse_pair_lines(
    path: Path, block: bytes, line: int, instances: int, labels: int, reading: Reading
) -> Int64:
    pairs = []
    for number, raw in enumerate(block[:-1].split(b"\n"), line):
        try:
            if raw.split():
                pairs.append(_parse_pair(raw, f"{path}:{number}", instances, labels, reading.base))
        except DataError as error:
            reading.refuse(error)
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _parse_pair(raw: bytes, where: str, instances: int, labels: int, base: IndexBase) -> tuple[int, int]:
    fields = raw.split()
    if len(fields) != 2:
        raise DataError(f"{where}: must be a pair 'instance label', found {shorten(raw)}; correct the line")
    return (
        _parse_index(where, "an instance", fields[0], instances, base.instances),
        _parse_index(where, "a label", fields[1], labels, base.labels),
    )


def _canonical(rows: CsrRows) -> tuple[CsrRows, int]:
    """Sort each row's indices and sum repeats; return also how many entries that saved."""
    indices, values = rows.indices, rows.values
    row = np.repeat(np.arange(rows.rows), np.diff(rows.offsets))
    keys = row * max(rows.columns, 1) + indices
    if (keys[1:] > keys[:-1]).all():
        return rows, 0
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.concatenate(([True], keys[1:] != keys[:-1]))
    if values is not None:
        with np.errstate(over="ignore"):
            sums = np.add.reduceat(values[order].astype(np.float64), np.flatnonzero(first))
            values = sums.astype(np.float32)
    offsets = np.concatenate(([0], np.cumsum(first)))[rows.offsets]
    merged = CsrRows(offsets, indices[order][first], values, rows.columns)
    return merged, len(keys) - len(merged.indices)
