"""Lines of raw input for a loaded model: texts, JSON objects, or features."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from xmlc.data.reader.sparse_text import parse_features, sum_repeats
from xmlc.data.rows import CsrRows
from xmlc.errors import DataError
from xmlc.evaluation.predict import Predictor
from xmlc.files import is_unicode, parse_json

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def parse_lines(predictor: Predictor, lines: Sequence[bytes], source: str, first: int) -> Any:
    """Turn lines into what ``predictor.predict`` takes.

    Args:
        predictor: Decides what a line is: a text or a JSON object with ``title``/``content`` or ``text``;
            ``feature:value`` pairs; or a JSON list of numbers. An empty line is an instance without text or
            features.
        lines: With or without line ends; line 1 may begin with a byte order mark.
        source: Names the file in errors.
        first: Number of the first line.

    Raises:
        DataError: A line does not fit; file and line are named.
    """
    decoded = _decoded(lines, source, first)
    wanted = predictor.model.problem.feature_count
    where = [f"{source}:{number}" for number in range(first, first + len(decoded))]
    if predictor.takes == "text":
        return [_text(line, place) for line, place in zip(decoded, where, strict=True)]
    if predictor.takes == "dense":
        rows = [_dense(line, wanted, place) for line, place in zip(decoded, where, strict=True)]
        return np.array(rows, np.float32).reshape(-1, wanted)
    offsets, columns, values = [0], list[int](), list[float]()
    for row, place in zip(decoded, where, strict=True):
        row_columns, row_values = parse_features(row.encode().split(), place, wanted)
        columns += row_columns
        values += row_values
        offsets.append(len(columns))
    pairs = CsrRows(
        np.array(offsets, np.int64), np.array(columns, np.int32), np.array(values, np.float32), wanted
    )
    return sum_repeats(pairs, source, first)[0].to_scipy()


def parse_labels(lines: Sequence[bytes], source: str) -> tuple[list[str], list[str]]:
    """Turn lines into texts and names of labels for ``predictor.with_labels``.

    A line is a text, which is the label's name as well, or a JSON object as for an instance, whose ``title``
    is.

    Raises:
        DataError: A line does not fit, or there is none; file and line are named.
    """
    texts, names = [], []
    for number, line in enumerate(_decoded(lines, source, 1), 1):
        place = f"{source}:{number}"
        text = _text(line, place)
        if not text:
            raise DataError(f"{place}: a label must have a text, found none; remove the line")
        texts.append(text)
        title = parse_json(line).get("title", "") if line.startswith("{") else ""
        names.append(title or text)
    if not texts:
        raise DataError(f"{source}: there must be at least one label, a line for each, found an empty file")
    return texts, names


def _decoded(lines: Sequence[bytes], source: str, first: int) -> list[str]:
    decoded = []
    for number, line in enumerate(lines, first):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            decoded.append(line.decode("utf-8").strip())
        except UnicodeDecodeError:
            raise DataError(
                f"{source}:{number}: must be UTF-8 text, found other bytes; convert the file"
            ) from None
    return decoded


def _text(line: str, place: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise DataError(
            f"{place}: a line that starts with {{ must be a JSON object, found: {error}; correct it"
        ) from None
    parts = {name: fields[name] for name in ("title", "content", "text") if name in fields}
    if not parts:
        raise DataError(
            f"{place}: the object must hold title, content or text, found "
            f"{json.dumps(list(fields))[:60] if fields else 'no key'}; add one"
        )
    for name, part in parts.items():
        if not isinstance(part, str) or not is_unicode(part):
            raise DataError(
                f"{place}: {name} must be a string of valid Unicode, found {json.dumps(part)[:60]}; "
                "correct it"
            )
    return " ".join(part for part in parts.values() if part)


def _dense(line: str, wanted: int, place: str) -> list[float]:
    try:
        values = parse_json(line)
    except ValueError:
        values = None
    if not isinstance(values, list) or len(values) != wanted or not all(map(_is_number, values)):
        raise DataError(
            f"{place}: must be a JSON list of {wanted} numbers, finite in float32, found {line[:60]!r}; "
            "correct it"
        )
    return values


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= _FLOAT32_MAX  # type: ignore[arg-type]
