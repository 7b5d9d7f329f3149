"""LF raw text: ``trn.json``, ``tst.json``, ``lbl.json``, one JSON object per line."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xmlc.data.dataset import Dataset, Split
from xmlc.data.reader.files import GRADED, Reading, decode, find, lines, require, shorten
from xmlc.data.reader.spool import Scratch, TextSpool
from xmlc.data.rows import CsrRows, TextColumn
from xmlc.errors import DataError
from xmlc.files import parse_json

FILES = ("trn.json", "tst.json", "lbl.json")
_KNOWN = {"uid", "title", "content", "target_ind", "target_rel"}
_Parsed = TypeVar("_Parsed")


def read_lf(folder: Path, scratch: Scratch, reading: Reading) -> Dataset:
    """Read a folder of LF raw text; ``tst.json`` may be absent.

    Raises:
        DataError: A file is missing or malformed.
    """
    train_path = require(folder, "trn.json")
    names, texts = read_labels(require(folder, "lbl.json"), scratch, reading)
    train = read_split(train_path, len(names), scratch, reading)
    test_path = find(folder, "tst.json")
    test = None if test_path is None else read_split(test_path, len(names), scratch, reading)
    return Dataset(
        name=folder.name,
        kind="text",
        train=train,
        test=test,
        label_count=len(names),
        feature_count=0,
        label_names=names,
        label_texts=texts,
    )


def read_labels(path: Path, scratch: Scratch, reading: Reading) -> tuple[TextColumn, TextColumn]:
    """Read names and texts of the labels.

    Raises:
        DataError: The file is empty, or a line malformed.
    """
    names, texts = TextSpool(scratch), TextSpool(scratch)

    def parse(record: dict[str, Any], where: str) -> tuple[str, str]:
        _count_unheld(record, reading)
        return _parse_text(record, where)

    for title, content in _parsed(path, parse, ("", ""), reading):
        names.append(title)
        texts.append(_join(title, content))
    columns = names.finish(), texts.finish()
    if not len(columns[0]):
        raise DataError(f"{path}: must hold one label in each line, found an empty file; add the labels")
    return columns


def read_split(path: Path, label_count: int, scratch: Scratch, reading: Reading) -> Split:
    """Read texts and labels of the instances.

    Raises:
        DataError: A line is malformed.
    """

    def parse(record: dict[str, Any], where: str) -> tuple[str, list[int]]:
        found = _labels(record, label_count, reading, where)
        _count_unheld(record, reading)
        return _join(*_parse_text(record, where)), found

    texts = TextSpool(scratch)
    offsets, indices = array("q", [0]), array("i")
    for text, found in _parsed(path, parse, ("", list[int]()), reading):
        texts.append(text)
        unique = sorted(set(found))
        reading.labels += len(found) - len(unique)
        indices.extend(unique)
        offsets.append(len(indices))
    labels = CsrRows(
        np.frombuffer(offsets, np.int64), np.frombuffer(indices or array("i"), np.int32), None, label_count
    )
    return Split(labels, texts=texts.finish())


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what every line says, but for the labels.

    Raises:
        DataError: A line is no JSON object.
    """

    def parse(record: dict[str, Any], where: str) -> dict[str, Any]:
        return {key: value for key, value in record.items() if not key.startswith("target_")}

    return _parsed(path, parse, {}, Reading())


def read_uids(path: Path) -> list[str]:
    """Return the ``uid`` of every line.

    Raises:
        DataError: A line is malformed, or holds no uid.
    """
    return list(_parsed(path, lambda record, where: _string(record, "uid", where), "", Reading()))


def _count_unheld(record: dict[str, Any], reading: Reading) -> None:
    reading.unheld["border between title and content"] += bool(record.get("title") and record.get("content"))
    reading.unheld["uid"] += "uid" in record
    reading.unheld["key unknown to xmlc"] += len(record.keys() - _KNOWN)


def _parsed(
    path: Path, parse: Callable[[dict[str, Any], str], _Parsed], empty: _Parsed, reading: Reading
) -> Iterator[_Parsed]:
    """Yield what ``parse(record, file:line)`` makes of every line; ``empty`` for one that was refused."""
    for where, line in _record_lines(path):
        try:
            parsed = parse(_record(line, where), where)
        except DataError as error:
            reading.refuse(error)
            parsed = empty
        yield parsed


def _record_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (``file:line``, line); blank lines at the end are left out."""
    blank: list[int] = []
    for number, line in lines(path):
        if not line.strip():
            blank.append(number)
            continue
        for earlier in blank:
            yield f"{path}:{earlier}", b""
        blank.clear()
        yield f"{path}:{number}", line


def _record(line: bytes, where: str) -> dict[str, Any]:
    if not line:
        raise DataError(f"{where}: must hold a JSON object, found a blank line; remove it")
    try:
        record = parse_json(decode(where, line))
    except ValueError as error:
        raise DataError(
            f"{where}: must be one JSON object in one line, found {shorten(line)} ({error}); correct it"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: must be a JSON object, found {shorten(line)}; correct the line")
    return record


def _parse_text(record: dict[str, Any], where: str) -> tuple[str, str]:
    return _string(record, "title", where), _string(record, "content", where, "")


def _string(record: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if not isinstance(value, str):
        found = "no such key" if key not in record else shorten(json.dumps(value))
        raise DataError(f"{where}: {key} must be a string, found {found}; correct the line")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {key} must be valid Unicode, found the lone surrogate "
                f"\\u{ord(value[error.start]):04x}; remove it"
            ) from None
    return value


def _join(title: str, content: str) -> str:
    return f"{title} {content}" if title and content else title or content


def _labels(record: dict[str, Any], label_count: int, reading: Reading, where: str) -> list[int]:
    """Return the labels of one instance, those with relevance 0 left out."""
    first = reading.base.labels
    labels = record.get("target_ind")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        found = "no such key" if "target_ind" not in record else shorten(json.dumps(labels))
        raise DataError(
            f"{where}: target_ind must be a list of whole numbers, found {found}; correct the line"
        )
    if first:
        labels = [label - first for label in labels]
    if labels and not 0 <= min(labels) <= max(labels) < label_count:
        wrong = next(label for label in labels if not 0 <= label < label_count) + first
        raise DataError(
            f"{where}: a label must be from {first} to {label_count - 1 + first}, found {wrong}; labels "
            f"count from {first} in the order of lbl.json: correct the line or add the label there"
        )
    relevance = record.get("target_rel")
    if "target_rel" not in record or relevance == [1.0] * len(labels):
        return labels
    if not isinstance(relevance, list) or len(relevance) != len(labels):
        raise DataError(
            f"{where}: target_rel must be a list of {len(labels)} numbers, one per label, found "
            f"{shorten(json.dumps(relevance))}; correct the line"
        )
    for value in relevance:
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise DataError(
                f"{where}: the relevance of a label must be a finite number of 0 or more, found "
                f"{shorten(json.dumps(value))}; correct the line"
            )
    reading.unheld[GRADED] += sum(value not in (0, 1) for value in relevance)
    return [label for label, value in zip(labels, relevance, strict=True) if value > 0]
