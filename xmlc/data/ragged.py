"""Labels of a batch, as users hold them, to compressed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from xmlc.data.rows import CsrRows, offsets_of
from xmlc.errors import DataError

RaggedLabels = (
    CsrRows
    | scipy.sparse.sparray
    | scipy.sparse.spmatrix
    | Tensor
    | Sequence[Sequence[int]]
    | tuple[np.ndarray, np.ndarray]
    | tuple[Tensor, Tensor]
)
"""A list of labels for each row, compressed rows (`CsrRows`, a SciPy matrix, or a tuple of two arrays or
tensors: offsets [row + 1] and labels), or an int tensor padded with negatives."""


def ragged_rows(labels: Any, rows: int | None, columns: int, where: str) -> CsrRows:
    """Return labels as compressed rows without values; a label given twice in a row counts once.

    Args:
        labels: See `RaggedLabels`. The stored entries of a matrix [row, columns] are labels; explicit zeros
            are not. Of a padded tensor [row, width], negative entries are padding.
        rows: Rows there must be; None takes any number.
        columns: Labels must lie in [0, columns).
        where: Names the labels in errors.

    Raises:
        DataError: The rows do not match, a label is no integer or out of range, a matrix has not ``columns``
            columns, or rows of integers are multi-hot (see `_looks_multi_hot`).
    """
    if isinstance(labels, CsrRows) or scipy.sparse.issparse(labels):
        labels = _of_columns(labels, columns, where)
    lengths, flat = _flatten(labels, where)
    rows = len(lengths) if rows is None else rows
    if len(lengths) != rows:
        raise DataError(
            f"{where}: must have one row for each of the {rows} embeddings, found {len(lengths)} rows"
        )
    outside = (flat < 0) | (flat >= columns)
    if outside.any():
        raise DataError(
            f"{where}: labels must lie in [0, {columns}), found {flat[outside][0]}; map or remove it"
        )
    if _looks_multi_hot(lengths, flat, columns):
        raise DataError(
            f"{where}: must be the labels themselves, found rows of {columns} numbers, only 0 and 1, which "
            "looks multi-hot; give lists of labels, a SciPy matrix (scipy.sparse.csr_array of the array), or "
            "an int tensor padded with -1"
        )
    keys = np.unique(np.repeat(np.arange(rows, dtype=np.int64), lengths) * columns + flat)
    counts = np.bincount(keys // columns, minlength=rows) if columns else np.zeros(rows, np.int64)
    return CsrRows(offsets_of(counts), (keys % max(columns, 1)).astype(np.int32), None, columns)


def holds_values(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and has values that can be read."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def described(value: Any) -> str:
    """Return in an error's words what was given where a tensor was wanted."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "" if value.layout is torch.strided else f"{value.layout} "
    return f"{layout}{value.dtype} {list(value.shape)} on {value.device}"


def _of_columns(matrix: Any, columns: int, where: str) -> CsrRows:
    """Return a matrix as compressed rows; with other columns it would be one of other labels."""
    rows = matrix if isinstance(matrix, CsrRows) else CsrRows.from_scipy(matrix, where)
    if rows.columns != columns:
        raise DataError(
            f"{where}: a matrix must have one column for each of the {columns} labels, found "
            f"[{rows.rows}, {rows.columns}]; give it all columns, in the order of the labels"
        )
    return rows


def _looks_multi_hot(lengths: np.ndarray, flat: np.ndarray, columns: int) -> bool:
    """Return whether every row has a 0 or 1 for each label: of lists it would repeat them in all rows.

    With one or two labels such rows may be lists.
    """
    full = columns > 2 and len(lengths) > 0 and bool((lengths == columns).all())
    return full and bool((flat <= 1).all())


def _flatten(labels: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of labels of each row and all labels, int64."""
    if isinstance(labels, CsrRows):
        stored = labels if labels.values is None else labels.keep(labels.values != 0)
        return np.diff(stored.offsets), stored.indices.astype(np.int64)
    if isinstance(labels, Tensor):
        if labels.dim() != 2 or labels.dtype not in (torch.int32, torch.int64) or not holds_values(labels):
            raise DataError(
                f"{where}: a tensor of labels must be dense int32 or int64 [row, width], padded with "
                f"negatives, found {described(labels)}"
            )
        padded = labels.detach().cpu().numpy()
        return (padded >= 0).sum(1), padded[padded >= 0].astype(np.int64)
    if isinstance(labels, tuple) and len(labels) == 2 and all(hasattr(part, "dtype") for part in labels):
        return _unpack(*labels, where)
    try:
        parts = [np.asarray(row) for row in labels]
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: must be a list of label lists, found {error}") from None
    for number, part in enumerate(parts):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise DataError(f"{where}: row {number} must be a list of integers, found {labels[number]!r}")
    lengths = np.array([len(part) for part in parts], np.int64)
    flat = np.concatenate([np.empty(0, np.int64), *(part.astype(np.int64) for part in parts)])
    return lengths, flat


def _unpack(offsets: Any, labels: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return `_flatten` of compressed rows given as two arrays or tensors."""
    for part in (offsets, labels):
        if isinstance(part, Tensor) and not holds_values(part):
            raise DataError(f"{where}: offsets and labels must be dense tensors, found {described(part)}")
    offsets, labels = (
        part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
        for part in (offsets, labels)
    )
    whole = all(part.ndim == 1 and part.dtype.kind in "iu" for part in (offsets, labels))
    lengths = np.diff(offsets.astype(np.int64)) if whole else np.empty(0, np.int64)
    if not whole or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(labels) or (lengths < 0).any():
        raise DataError(
            f"{where}: a tuple of two arrays must be offsets [row + 1] and labels, integers, the offsets "
            "rising from 0 to the number of labels, found others; give rows of labels as a list"
        )
    return lengths, labels.astype(np.int64)
