"""Lines of raw input for a loaded model: texts, JSON objects, or features."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse

from xmlc.errors import DataError
from xmlc.evaluation.predict import Predictor


def parse_lines(predictor: Predictor, lines: Sequence[bytes], source: str, first: int) -> Any:
    """Turn lines into what ``predictor.predict`` takes; an empty line is an instance without content.

    Args:
        predictor: Decides what a line is: a text or a JSON object with ``title``/``content`` or ``text``;
            ``feature:value`` pairs; or a JSON list of numbers.
        lines: With or without line ends.
        source: Names the file in errors.
        first: Number of the first line.

    Raises:
        DataError: A line does not fit; file and line are named.
    """
    decoded = []
    for number, line in enumerate(lines, first):
        try:
            decoded.append(line.decode("utf-8").strip())
        except UnicodeDecodeError:
            raise DataError(
                f"{source}:{number}: must be UTF-8 text, found other bytes; convert the file"
            ) from None
    wanted = predictor.model.problem.feature_count
    where = [f"{source}:{number}" for number in range(first, first + len(decoded))]
    if predictor.takes == "text":
        return [_text(line, place) for line, place in zip(decoded, where, strict=True)]
    if predictor.takes == "dense":
        return np.array(
            [_dense(line, wanted, place) for line, place in zip(decoded, where, strict=True)], np.float32
        )
    offsets, columns, values = [0], [], []
    for row, place in zip(decoded, where, strict=True):
        for pair in row.split():
            column, value = _pair(pair, wanted, place)
            columns.append(column)
            values.append(value)
        offsets.append(len(columns))
    return scipy.sparse.csr_array(
        (np.array(values, np.float32), np.array(columns, np.int64), np.array(offsets, np.int64)),
        shape=(len(decoded), wanted),
    )


def _text(line: str, place: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: a line that starts with {{ must be a JSON object, found: {error}; correct it"
        ) from None
    parts = [fields[name] for name in ("title", "content", "text") if fields.get(name)]
    if not any(name in fields for name in ("title", "content", "text")) or not all(
        isinstance(part, str) for part in parts
    ):
        raise DataError(
            f"{place}: the object must hold strings under title, content or text, found keys "
            f"{', '.join(fields) or 'none'}; add one"
        )
    return " ".join(parts)


def _dense(line: str, wanted: int, place: str) -> list[float]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        values = None
    if (
        not isinstance(values, list)
        or len(values) != wanted
        or not all(isinstance(v, int | float) for v in values)
    ):
        raise DataError(f"{place}: must be a JSON list of {wanted} numbers, found {line[:60]!r}; correct it")
    return values


def _pair(pair: str, wanted: int, place: str) -> tuple[int, float]:
    feature, colon, value = pair.partition(":")
    try:
        column, number = int(feature), float(value)
    except ValueError:
        column, number = -1, float("nan")
    if not colon or not 0 <= column < wanted or not np.isfinite(number):
        raise DataError(
            f"{place}: must hold feature:value pairs with features from 0 to {wanted - 1} and finite values, "
            f"found {pair!r}; correct it"
        )
    return column, number
