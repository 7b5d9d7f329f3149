"""Split matrices: features ``trn_X_Xf`` and labels ``trn_X_Y``, as text, ``.npz`` or ``.npy``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.sparse
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from xmlc.data.dataset import (
    Dataset,
    Features,
    Kind,
    Split,
    check_dense,
    feature_columns,
    label_rows,
    negative_label,
)
from xmlc.data.reader.files import GRADED, Reading, find
from xmlc.data.reader.sparse_text import Layout, read_header, read_rows
from xmlc.data.reader.spool import Scratch
from xmlc.data.reader.texts import find_texts
from xmlc.data.rows import CsrRows, row_of
from xmlc.errors import DataError

_STEMS = ("trn_X_Xf", "trn_X_Y", "tst_X_Xf", "tst_X_Y", "lbl_X_Xf")
_SUFFIXES = (".txt", ".npz", ".npy")
TEXT_FILES = ("trn_raw_texts.txt", "tst_raw_texts.txt", "lbl_raw_texts.txt", "Yf.txt", "Xf.txt")
FILES = (*(stem + suffix for stem in _STEMS for suffix in _SUFFIXES), *TEXT_FILES)
STARTS = tuple(stem + suffix for stem in _STEMS[:4] for suffix in _SUFFIXES)
_MOST_TOLD = 300  # characters of a library's own message, which may hold parts of the file


def read_matrices(folder: Path, scratch: Scratch, reading: Reading) -> Dataset:
    """Read a folder of matrices.

    ``trn_X_Y`` and either ``trn_X_Xf`` or ``trn_raw_texts.txt`` must be there; the test files, ``lbl_X_Xf``,
    ``lbl_raw_texts.txt``, ``Yf.txt`` (label names) and ``Xf.txt`` (feature names) may be.

    Raises:
        DataError: A file is missing or malformed.
    """
    train = _read_split(folder, "trn", scratch, reading)
    test = None
    if any(_find_matrix(folder, stem) is not None for stem in ("tst_X_Y", "tst_X_Xf")):
        test = _read_split(folder, "tst", scratch, reading)
    labels, features = train.labels.columns, feature_columns(train.features)
    kind: Kind = (
        "text" if train.features is None else "sparse" if isinstance(train.features, CsrRows) else "dense"
    )
    label_path = _find_matrix(folder, "lbl_X_Xf")
    return Dataset(
        name=folder.name,
        kind=kind,
        train=train,
        test=test,
        label_count=labels,
        feature_count=features,
        label_names=find_texts(folder, ("Yf.txt",), labels, scratch, reading),
        label_texts=find_texts(folder, ("lbl_raw_texts.txt",), labels, scratch, reading),
        label_features=None if label_path is None else read_features(label_path, scratch, reading),
        feature_names=find_texts(folder, ("Xf.txt",), features, scratch, reading) if features else None,
    )


def read_features(path: Path, scratch: Scratch, reading: Reading) -> Features:
    """Read features [row, feature]: sparse from ``.txt`` or ``.npz``, dense and memory-mapped from ``.npy``.

    Raises:
        DataError: The file is malformed, pickled, or holds values that are not finite in float32.
    """
    if path.suffix == ".npy":
        dense = _load_array(path)
        check_dense(dense, str(path))
        return dense
    if path.suffix == ".npz":
        matrix, repeats = _read_npz(path)
        reading.features += repeats
        return matrix
    rows, columns = read_header(path, ("rows", "columns"))
    return read_rows(Layout(path, rows, columns, None, base=reading.base), scratch, reading)[0]


def read_labels(path: Path, scratch: Scratch, reading: Reading) -> CsrRows:
    """Read a label matrix [instance, label] from ``.txt`` or ``.npz``; a value above 0 is a label, 0 is none.

    Raises:
        DataError: The file is malformed or pickled, or a value is negative or not finite.
    """
    if path.suffix == ".npy":
        raise DataError(f"{path}: labels must be sparse, .txt or .npz, found .npy; save them as SciPy .npz")
    if path.suffix == ".npz":
        matrix, repeats = _read_npz(path)
        reading.labels += repeats
        _count_graded(matrix, reading)
        return label_rows(matrix, str(path))
    rows, columns = read_header(path, ("rows", "columns"))
    before = reading.features
    matrix = read_rows(Layout(path, rows, columns, None, "label", reading.base), scratch, reading)[0]
    reading.labels += reading.features - before
    reading.features = before
    assert matrix.values is not None
    for entry in np.flatnonzero(matrix.values < 0):
        line = row_of(matrix.offsets, int(entry)) + 2  # after the header, 1-based
        reading.refuse(negative_label(matrix, int(entry), f"{path}:{line}"))
    _count_graded(matrix, reading)
    return label_rows(replace(matrix, values=np.maximum(matrix.values, 0)), str(path))


def _count_graded(labels: CsrRows, reading: Reading) -> None:
    assert labels.values is not None
    reading.unheld[GRADED] += int(np.count_nonzero((labels.values != 0) & (labels.values != 1)))


def _find_matrix(folder: Path, stem: str) -> Path | None:
    paths = [path for suffix in _SUFFIXES if (path := find(folder, stem + suffix)) is not None]
    if len(paths) > 1:
        raise DataError(
            f"{folder}: must hold one of {' and '.join(path.name for path in paths)}, found both; remove one"
        )
    return paths[0] if paths else None


def _read_split(folder: Path, prefix: str, scratch: Scratch, reading: Reading) -> Split:
    label_path = _find_matrix(folder, f"{prefix}_X_Y")
    if label_path is None:
        raise DataError(
            f"{folder}: must hold the labels {prefix}_X_Y.txt, .txt.gz or .npz, found none; put one there"
        )
    labels = read_labels(label_path, scratch, reading)
    path = _find_matrix(folder, f"{prefix}_X_Xf")
    features = None if path is None else read_features(path, scratch, reading)
    texts = find_texts(folder, (f"{prefix}_raw_texts.txt",), labels.rows, scratch, reading)
    if features is None and texts is None:
        raise DataError(
            f"{folder}: must hold {prefix}_X_Xf.txt, .npz or .npy, or {prefix}_raw_texts.txt, found none; "
            "put one there"
        )
    return Split(labels, features, texts)


def _read_npz(path: Path) -> tuple[CsrRows, int]:
    """Return a saved matrix, and how many repeated entries were summed."""
    try:
        with path.open("rb") as file:
            _check_index_arrays(file)
            file.seek(0)
            matrix = scipy.sparse.load_npz(file)  # refuses pickles
    except Exception as error:  # a damaged file may raise anything: of zipfile, zlib, NumPy or SciPy
        raise DataError(
            f"{path}: must be a sparse matrix saved by scipy.sparse.save_npz without pickled objects, found: "
            f"{str(error)[:_MOST_TOLD]}; save it again"
        ) from None
    merged = CsrRows.from_scipy(matrix, str(path))
    return merged, matrix.nnz - len(merged.indices)


def _check_index_arrays(file: BinaryIO) -> None:
    with np.load(file) as arrays:
        for name in ("indices", "indptr", "row", "col"):
            if name in arrays and arrays[name].dtype.kind not in "iu":  # SciPy would cut off fractions
                raise ValueError(f"{name} of dtype {arrays[name].dtype}, not of integers")


def _load_array(path: Path) -> NDArray[Any]:
    try:
        return open_memmap(path, mode="r")  # refuses pickles
    except Exception as error:  # a damaged header may raise anything
        raise DataError(
            f"{path}: must be an array saved by numpy.save without pickled objects, found: "
            f"{str(error)[:_MOST_TOLD]}; "
            "save it again"
        ) from None
