"""Lines of ``index:value`` pairs, with or without a leading label field, and filter pairs.

Two parsers read the same language. The native one (``cuda_ext/cpu/sparse_text.cpp``) takes many lines at
once and stops at a line that is not plainly right; `_parse_line` reads that line and says what is wrong
with it, if anything is. So every error names its line, and clean data is fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from xmlc.data.reader.files import IndexBase, Reading, line_blocks, line_count, shorten
from xmlc.data.reader.spool import RowsSpool, Scratch
from xmlc.data.rows import CsrRows, Int64
from xmlc.errors import DataError
from xmlc.native import cpu

_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LONGEST_COUNT = 10  # digits of INT32_MAX
INT32_MAX = 2**31 - 1


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
        body, count = _without_surplus(layout, body, body_line, layout.rows - features.rows)
        if not body:
            continue
        feature_part, label_part, ascending = _parse_block(body, body_line, count, layout, reading)
        if not ascending:
            feature_part, repeats = _canonical(feature_part)
            for error in _overflows(feature_part, str(layout.path), body_line):
                reading.refuse(error)
            reading.features += repeats
        features.append(feature_part)
        if label_part is not None:
            if not ascending:
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
        if not _NUMBER.fullmatch(value) or not _is_finite_float32(float(value)):
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
        blocks.append(_parse_pairs(path, block, line, instances, labels, reading))
    return np.concatenate(blocks, axis=1)


def _parse_pairs(path: Path, block: bytes, line: int, instances: int, labels: int, reading: Reading) -> Int64:
    lines = line_count(block)
    pairs = np.empty((lines, 2), np.int64)
    progress = cpu.TextProgress()
    while True:
        cpu.parse_index_pairs(
            text=block,
            rows=instances,
            first_row=reading.base.instances,
            columns=labels,
            first_column=reading.base.labels,
            pairs=pairs.ctypes.data,
            progress=progress,
        )
        if progress.lines == lines:
            return pairs[: progress.pairs].T
        end = block.index(b"\n", progress.at)
        where = f"{path}:{line + progress.lines}"
        try:
            pairs[progress.pairs] = _parse_pair(
                block[progress.at : end], where, instances, labels, reading.base
            )
            progress.pairs += 1
        except DataError as error:
            reading.refuse(error)
        progress.lines += 1
        progress.at = end + 1


def _is_count(field: bytes) -> bool:
    return field.isdigit() and len(field) <= _LONGEST_COUNT and int(field) <= INT32_MAX


def _without_surplus(layout: Layout, body: bytes, line: int, expected: int) -> tuple[bytes, int]:
    """Cut the lines beyond the ``expected`` ones, which must be blank; return also how many are left."""
    count = line_count(body)
    if count <= expected:
        return body, count
    split = body.split(b"\n")
    for number, text in enumerate(split[expected:], line + expected):
        if text.strip():
            raise DataError(
                f"{layout.path}:{number}: the header promises {layout.rows} rows, found more: "
                f"{shorten(text)}; correct the header"
            )
    return b"".join(text + b"\n" for text in split[:expected]), expected


def _parse_block(
    body: bytes, line: int, lines: int, layout: Layout, reading: Reading
) -> tuple[CsrRows, CsrRows | None, bool]:
    """Parse so many whole lines; return also whether the columns and labels of each ascend strictly."""
    labelled = layout.labels is not None
    offsets, label_offsets = np.zeros((2, lines + 1), np.int64)
    # As much as can stand in so many bytes; what is not touched takes no memory.
    indices, values = np.empty(len(body) // 4 + 1, np.int32), np.empty(len(body) // 4 + 1, np.float32)
    labels = np.empty(len(body) // 2 + 1 if labelled else 0, np.int32)
    progress = cpu.TextProgress()
    ascending = True
    while True:
        cpu.parse_sparse_text(
            text=body,
            columns=layout.columns,
            first_column=layout.first_column,
            labels=-1 if layout.labels is None else layout.labels,
            first_label=layout.base.labels,
            offsets=offsets.ctypes.data,
            indices=indices.ctypes.data,
            values=values.ctypes.data,
            label_offsets=label_offsets.ctypes.data,
            label_indices=labels.ctypes.data,
            progress=progress,
        )
        if progress.lines == lines:
            break
        end = body.index(b"\n", progress.at)
        where = f"{layout.path}:{line + progress.lines}"
        line_labels, line_indices, line_values = _parse_or_refuse(
            body[progress.at : end], where, layout, reading
        )
        labels[progress.labels : progress.labels + len(line_labels)] = line_labels
        indices[progress.pairs : progress.pairs + len(line_indices)] = line_indices
        values[progress.pairs : progress.pairs + len(line_values)] = line_values
        ascending &= _ascends(line_labels) and _ascends(line_indices)
        progress.labels += len(line_labels)
        progress.pairs += len(line_indices)
        progress.lines += 1
        progress.at = end + 1
        offsets[progress.lines] = progress.pairs
        label_offsets[progress.lines] = progress.labels
    pairs = slice(progress.pairs)
    features = CsrRows(offsets, indices[pairs], values[pairs], layout.columns)
    ascending &= not progress.unordered
    if layout.labels is None:
        return features, None, ascending
    return features, CsrRows(label_offsets, labels[: progress.labels], None, layout.labels), ascending


def _ascends(indices: list[int]) -> bool:
    return all(first < second for first, second in pairwise(indices))


def _parse_or_refuse(
    raw: bytes, where: str, layout: Layout, reading: Reading
) -> tuple[list[int], list[int], list[float]]:
    try:
        return _parse_line(raw, where, layout)
    except DataError as error:
        reading.refuse(error)
        return [], [], []


def _is_finite_float32(value: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(value)))


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
    keys = rows.entry_rows * max(rows.columns, 1) + indices
    if (keys[1:] > keys[:-1]).all():
        return rows, 0
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.concatenate(([True], keys[1:] != keys[:-1]))
    if values is not None:
        with np.errstate(over="ignore"):
            sums = np.add.reduceat(values[order].astype(np.float64), np.flatnonzero(first))
            values = sums.astype(np.float32)
    merged = replace(rows, indices=indices[order], values=None).keep(first)
    return replace(merged, values=values), len(keys) - len(merged.indices)
