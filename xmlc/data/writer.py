"""Writes a data set as the files of one layout; what a layout cannot hold is refused, never dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmlc.data.dataset import Dataset, Features
from xmlc.data.rows import CsrRows, TextColumn
from xmlc.errors import DataError
from xmlc.files import is_unicode

Format = Literal["xmc", "matrix", "npz", "lf"]
FORMATS: tuple[Format, ...] = get_args(Format)

_ROWS_PER_BLOCK = 4096
_SPLIT_PARTS = ("features", "texts", "filter_pairs")
_PARTS = ("label_names", "label_texts", "label_features", "feature_names")

# What a layout holds beside the labels of its instances.
_HOLDS: dict[Format, frozenset[str]] = {
    "xmc": frozenset({"features", "filter_pairs", "label_names", "feature_names"}),
    "matrix": frozenset({*_SPLIT_PARTS, *_PARTS}),
    "npz": frozenset({*_SPLIT_PARTS, *_PARTS}),
    "lf": frozenset({"texts", "filter_pairs", "label_names", "label_texts"}),
}
PARTS = (*_SPLIT_PARTS, *_PARTS)

LF_FILES = {"train": "trn.json", "test": "tst.json", "labels": "lbl.json"}
Records = Mapping[str, Iterable[Mapping[str, Any]]]


def write_dataset(
    dataset: Dataset, folder: Path, layout: Format, records: Records = MappingProxyType({})
) -> None:
    """Write every part of a data set into an empty folder.

    Args:
        dataset: What to write.
        folder: Takes the files.
        layout: ``xmc`` text, ``matrix`` text, ``npz`` (with ``.npy`` for dense features), or ``lf`` raw text.
        records: For ``lf``: what the lines of ``train``, ``test`` and ``labels`` say beside labels, where
            they come from LF raw text; otherwise title and content are made of the texts.

    Raises:
        DataError: The layout cannot hold a part of the data set, or a text of it.
    """
    _check_holds(dataset, layout)
    if layout == "lf":
        _write_lf(dataset, folder, records)
    else:
        _WRITERS[layout](dataset, folder)
    for name, split in dataset.splits.items():
        if split.filter_pairs is not None:
            _write_lines(folder / f"filter_labels_{name}.txt", pair_lines(split.filter_pairs))


def pair_lines(pairs: CsrRows) -> Iterator[str]:
    """Yield the lines of a filter file."""
    for row, (start, end) in enumerate(pairwise(pairs.offsets.tolist())):
        for label in pairs.indices[start:end].tolist():
            yield f"{row} {label}"


def _check_holds(dataset: Dataset, layout: Format) -> None:
    present = {part for part in _PARTS if getattr(dataset, part) is not None}
    present |= {
        part for split in dataset.splits.values() for part in _SPLIT_PARTS if getattr(split, part) is not None
    }
    lost = [part for part in PARTS if part in present - _HOLDS[layout]]
    if lost:
        raise DataError(
            f"{dataset.name}: {layout} must hold every part of the data set, found {', '.join(lost)}, which "
            f"it cannot; choose another format, or leave them out: {_without(lost)}"
        )
    needed = {"xmc": ("features",), "lf": ("texts", "label_names")}.get(layout, ())
    for part in needed:
        if part not in present:
            raise DataError(f"{dataset.name}: {layout} needs {part}, found none; choose another format")
    dense = [
        part
        for part, features in (
            ("features", dataset.train.features),
            ("label_features", dataset.label_features),
        )
        if isinstance(features, np.ndarray)
    ]
    if dense and layout != "npz":
        raise DataError(
            f"{dataset.name}: {layout} holds sparse features, found dense {' and '.join(dense)}; choose npz"
        )


def _without(parts: Iterable[str]) -> str:
    return " ".join(f"--without {part}" for part in parts)


# ---- XMC text ---------------------------------------------------------------------------------------------


def _write_xmc(dataset: Dataset, folder: Path) -> None:
    for name, split in dataset.splits.items():
        assert isinstance(split.features, CsrRows), "checked before"
        labels = _row_texts(split.labels)
        header = f"{split.instances} {dataset.feature_count} {dataset.label_count}"
        features = _row_texts(split.features, ":1")
        body = (f"{row} {pairs}" for row, pairs in zip(labels, features, strict=True))
        _write_lines(folder / f"{name}.txt", [header], body)
    _write_texts(folder / "labels.txt", dataset.label_names)
    _write_texts(folder / "features.txt", dataset.feature_names)


# ---- split matrices ---------------------------------------------------------------------------------------


def _write_matrix(dataset: Dataset, folder: Path) -> None:
    def write(stem: str, matrix: Features) -> None:
        assert isinstance(matrix, CsrRows), "checked before"
        header = f"{matrix.rows} {matrix.columns}"
        _write_lines(folder / f"{stem}.txt", [header], _row_texts(matrix, ":1"))

    _write_parts(dataset, folder, write)


def _write_npz(dataset: Dataset, folder: Path) -> None:
    def write(stem: str, features: Features) -> None:
        if isinstance(features, CsrRows):
            scipy.sparse.save_npz(folder / f"{stem}.npz", features.to_scipy(), compressed=False)
        else:
            np.save(folder / f"{stem}.npy", features, allow_pickle=False)

    _write_parts(dataset, folder, write)


def _write_parts(dataset: Dataset, folder: Path, write: Callable[[str, Features], None]) -> None:
    for name, split in dataset.splits.items():
        prefix = {"train": "trn", "test": "tst"}[name]
        write(f"{prefix}_X_Y", split.labels)
        if split.features is not None:
            write(f"{prefix}_X_Xf", split.features)
        _write_texts(folder / f"{prefix}_raw_texts.txt", split.texts)
    if dataset.label_features is not None:
        write("lbl_X_Xf", dataset.label_features)
    _write_texts(folder / "Yf.txt", dataset.label_names)
    _write_texts(folder / "lbl_raw_texts.txt", dataset.label_texts)
    _write_texts(folder / "Xf.txt", dataset.feature_names)


# ---- LF raw text ------------------------------------------------------------------------------------------


def _write_lf(dataset: Dataset, folder: Path, records: Records) -> None:
    for name, split in dataset.splits.items():
        assert split.texts is not None, "checked before"
        offsets, indices = split.labels.offsets.tolist(), split.labels.indices
        lines = records.get(name) or ({"title": text} for text in split.texts)
        _write_lines(
            folder / LF_FILES[name],
            (
                _json({**line, "target_ind": indices[start:end].tolist()})
                for line, (start, end) in zip(lines, pairwise(offsets), strict=True)
            ),
        )
    assert dataset.label_names is not None, "checked before"
    texts = dataset.label_names if dataset.label_texts is None else dataset.label_texts
    lines = records.get("labels") or (
        {"title": name, **_content(name, text, f"{dataset.name}: label {label}")}
        for label, (name, text) in enumerate(zip(dataset.label_names, texts, strict=True))
    )
    _write_lines(folder / LF_FILES["labels"], map(_json, lines))


def _content(name: str, text: str, where: str) -> dict[str, str]:
    """Return the content that, after the name, gives the text."""
    if text == name:
        return {}
    if not name:
        return {"content": text}
    if text.startswith(f"{name} ") and len(text) > len(name) + 1:
        return {"content": text[len(name) + 1 :]}
    raise DataError(
        f"{where}: lf holds texts that begin with the label's name, found the name {name[:60]!r} and the "
        f"text {text[:60]!r}; choose another format, or leave the texts out: --without label_texts"
    )


def _json(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(record)  # a lone surrogate in what xmlc does not read


# ---- lines ------------------------------------------------------------------------------------------------


def _row_texts(rows: CsrRows, ones: str = "") -> Iterator[str]:
    """Yield each row: ``index:value`` pairs; without values its indices and ``ones``, or joined by commas."""
    for first in range(0, rows.rows, _ROWS_PER_BLOCK):
        offsets = rows.offsets[first : first + _ROWS_PER_BLOCK + 1].tolist()
        entries = [str(index) for index in rows.indices[offsets[0] : offsets[-1]].tolist()]
        if rows.values is not None:
            values = decimals(rows.values[offsets[0] : offsets[-1]])
            entries = [f"{index}:{value}" for index, value in zip(entries, values, strict=True)]
        elif ones:
            entries = [entry + ones for entry in entries]
        joint = " " if ones else ","
        for start, end in pairwise(offsets):
            yield joint.join(entries[start - offsets[0] : end - offsets[0]])


def decimals(values: NDArray[np.float32]) -> list[str]:
    """Return decimal numbers that, read as float64 and rounded to float32, are the values again.

    The shortest that lie nearest; where one of these is so close to the middle of two float32 that rounding
    twice would miss, nine digits for all, which never do.
    """
    shortest: list[str] = np.asarray(values, np.float32).astype("U32").tolist()
    read = np.array(shortest, np.float64).astype(np.float32)
    if np.array_equal(read.view(np.int32), np.asarray(values, np.float32).view(np.int32)):
        return [text.removesuffix(".0") for text in shortest]
    return [f"{value:.9g}" for value in values.tolist()]


def _write_texts(path: Path, texts: TextColumn | None) -> None:
    if texts is not None:
        _write_lines(path, _checked_lines(path.name, texts))


def _checked_lines(name: str, texts: TextColumn) -> Iterator[str]:
    for row, text in enumerate(texts):
        if "\n" in text or "\0" in text or text.endswith("\r") or (not row and text.startswith("\ufeff")):
            raise DataError(
                f"{name}: a text must fit into one line, found {text[:60]!r} in row {row}; choose lf, which "
                "holds any text"
            )
        yield text


def _write_lines(path: Path, *parts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for part in parts:
            file.writelines(f"{line}\n" for line in part)


_WRITERS: dict[Format, Callable[[Dataset, Path], None]] = {
    "xmc": _write_xmc,
    "matrix": _write_matrix,
    "npz": _write_npz,
}
