"""A data set: instances with features, dense or sparse, or text, and their labels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmlc.data.rows import CsrRows, TextColumn, row_of
from xmlc.errors import DataError

Kind = Literal["sparse", "dense", "text"]
Features = CsrRows | NDArray[Any]
SparseMatrix: TypeAlias = scipy.sparse.sparray | scipy.sparse.spmatrix

DEFAULT_PROPENSITY_A = 0.55
DEFAULT_PROPENSITY_B = 1.5
_BYTES_PER_BLOCK = 1 << 22


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test instances; row i of every column belongs to instance i."""

    labels: CsrRows  # [instance, label], without values
    features: Features | None = None  # [instance, feature] or dense [instance, hidden]
    texts: TextColumn | None = None  # [instance]
    filter_pairs: CsrRows | None = None  # [instance, label], to be masked in evaluation

    @property
    def instances(self) -> int:
        """Number of instances, those without labels, features or text included."""
        return self.labels.rows


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test split over the same labels."""

    name: str
    kind: Kind
    """What an instance is to the encoder: sparse or dense features, or text yet to be vectorised."""
    train: Split
    test: Split | None
    label_count: int
    feature_count: int
    """Columns of the features; 0 for text."""
    label_names: TextColumn | None = None  # [label]
    label_texts: TextColumn | None = None  # [label]
    label_features: Features | None = None  # [label, feature]
    feature_names: TextColumn | None = None  # [feature]
    propensity_a: float = DEFAULT_PROPENSITY_A
    propensity_b: float = DEFAULT_PROPENSITY_B
    """Constants of the propensity model (Jain et al. 2016, eq. 3)."""
    fingerprint: str = ""
    """BLAKE2b over every array: equal for equal content, wherever it was read from."""
    source: Path | None = None
    """Folder it was read from."""
    warnings: tuple[str, ...] = ()
    """What was repaired while reading."""

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that there are, by name: ``train`` and, after it, ``test``."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})

    @classmethod
    def from_arrays(
        cls,
        features: CsrRows | SparseMatrix | NDArray[Any] | Sequence[str],
        labels: CsrRows | SparseMatrix,
        *,
        test_features: CsrRows | SparseMatrix | NDArray[Any] | Sequence[str] | None = None,
        test_labels: CsrRows | SparseMatrix | None = None,
        label_names: Sequence[str] | None = None,
        label_texts: Sequence[str] | None = None,
        name: str = "arrays",
        propensity_a: float = DEFAULT_PROPENSITY_A,
        propensity_b: float = DEFAULT_PROPENSITY_B,
    ) -> Dataset:
        """Build a data set in memory.

        Args:
            features: Sparse or dense [instance, feature], or one string for each instance.
            labels: Sparse [instance, label]; a stored value above 0 is a label.
            test_features: As ``features``, of the test instances; with ``test_labels`` or not at all.
            test_labels: As ``labels``.
            label_names: One name for each label.
            label_texts: One text for each label.
            name: Names the data set in reports and errors.
            propensity_a: A of the propensity model.
            propensity_b: B of the propensity model.

        Raises:
            DataError: Numbers of rows or columns disagree, or a value is not a finite real number.
        """
        kind, train = _split_from_arrays(features, labels, f"{name}: training")
        test = None
        if (test_features is None) != (test_labels is None):
            raise DataError(f"{name}: test_features and test_labels must be given together, found one alone")
        if test_features is not None and test_labels is not None:
            test_kind, test = _split_from_arrays(test_features, test_labels, f"{name}: test")
            if test_kind != kind:
                raise DataError(
                    f"{name}: training and test features must be of one kind, found {kind} and {test_kind}"
                )
        names, described = (
            None if texts is None else text_column(texts, f"{name}: {column}")
            for column, texts in (("label_names", label_names), ("label_texts", label_texts))
        )
        dataset = cls(
            name=name,
            kind=kind,
            train=train,
            test=test,
            label_count=train.labels.columns,
            feature_count=feature_columns(train.features),
            label_names=names,
            label_texts=described,
            propensity_a=propensity_a,
            propensity_b=propensity_b,
        )
        check_agreement(dataset)
        return replace(dataset, fingerprint=content_fingerprint(dataset))


def feature_columns(features: Features | None) -> int:
    """Return the number of feature columns; 0 where there are only texts."""
    if features is None:
        return 0
    return features.columns if isinstance(features, CsrRows) else features.shape[1]


def label_rows(matrix: CsrRows, where: str) -> CsrRows:
    """Return the structure of a label matrix: a value above 0 is a label, a stored 0 is none.

    Raises:
        DataError: A value is negative.
    """
    if matrix.values is None:
        return matrix
    if (matrix.values < 0).any():
        raise negative_label(matrix, int(np.argmax(matrix.values < 0)), where)
    kept = matrix.values > 0
    if kept.all():
        return replace(matrix, values=None)
    return replace(matrix, values=None).keep(kept)


def negative_label(matrix: CsrRows, entry: int, where: str) -> DataError:
    """Return the error that a stored value of a label matrix is negative."""
    assert matrix.values is not None
    return DataError(
        f"{where}: the relevance of a label must be 0 or more, found {matrix.values[entry]} for label "
        f"{matrix.indices[entry]} in row {row_of(matrix.offsets, entry)}; remove the label or correct it"
    )


def check_dense(features: NDArray[Any], where: str) -> None:
    """Check dense features [instance, hidden] block by block, so that a mapped file stays on disk.

    Raises:
        DataError: It is not a real matrix, or a value is not finite in float32.
    """
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        raise DataError(
            f"{where}: dense features must be a real matrix [instance, hidden], found dtype {features.dtype} "
            f"with shape {list(features.shape)}; save one of float32"
        )
    for first in range(0, len(features), step := _rows_per_block(features)):
        with np.errstate(over="ignore"):
            block = np.asarray(features[first : first + step], dtype=np.float32)
        finite = np.isfinite(block)
        if not finite.all():
            row, column = np.argwhere(~finite)[0].tolist()
            raise DataError(
                f"{where}: features must be finite in float32, found {features[first + row, column]} in row "
                f"{first + row}, column {column}; remove or correct it"
            )


def check_agreement(dataset: Dataset) -> None:
    """Check that there is something to train on, and that rows and columns of all parts agree.

    Raises:
        DataError: There is not, or two parts disagree; both figures are named.
    """
    for problem in disagreements(dataset):
        raise DataError(problem)


def disagreements(dataset: Dataset) -> Iterator[str]:
    """Yield everything that `check_agreement` refuses."""
    where = str(dataset.source or dataset.name)
    if not dataset.train.instances or not dataset.label_count:
        yield (
            f"{where}: training must hold at least one instance and one label, found "
            f"{dataset.train.instances} instances and {dataset.label_count} labels; add data"
        )
    for name, split in dataset.splits.items():
        split_name = {"train": "training"}.get(name, name)
        for part in ("features", "texts", "filter_pairs"):
            column = getattr(split, part)
            rows = split.instances if column is None else row_count(column)
            if rows != split.instances:
                yield (
                    f"{where}: the {split_name} {part} must have a row for each of the {split.instances} "
                    f"rows of labels, found {rows}; use parts that belong together"
                )
        for noun, expected, found in (
            ("labels", dataset.label_count, split.labels.columns),
            ("features", dataset.feature_count, feature_columns(split.features)),
        ):
            if found != expected:
                yield (
                    f"{where}: training and test must have the same {noun}, found {expected} in training "
                    f"and {found} in {split_name}; use parts that belong together"
                )
    for part, count in (
        ("label_names", dataset.label_count),
        ("label_texts", dataset.label_count),
        ("label_features", dataset.label_count),
        ("feature_names", dataset.feature_count),
    ):
        column = getattr(dataset, part)
        if column is not None and row_count(column) != count:
            yield (
                f"{where}: {part} must have {count} rows, one for each {part.split('_')[0]}, found "
                f"{row_count(column)}; use parts that belong together"
            )


def row_count(column: CsrRows | Sized) -> int:
    """Return the number of rows of any kind of column."""
    return column.rows if isinstance(column, CsrRows) else len(column)


def arrays_of(dataset: Dataset) -> dict[str, NDArray[Any]]:
    """Return every array by its dotted place, such as ``train.labels.offsets``."""
    arrays: dict[str, NDArray[Any]] = {}

    def visit(prefix: str, value: object) -> None:
        if isinstance(value, np.ndarray):
            arrays[prefix] = value
        elif is_dataclass(value):
            for field in fields(value):
                visit(f"{prefix}.{field.name}" if prefix else field.name, getattr(value, field.name))

    visit("", dataset)
    return arrays


def content_fingerprint(dataset: Dataset) -> str:
    """Return 32 hexadecimal digits of BLAKE2b over the arrays: name, dtype, shape and bytes of each."""
    digest = hashlib.blake2b(f"{dataset.kind} {dataset.label_count}".encode(), digest_size=16)
    for place, array in sorted(arrays_of(dataset).items()):
        digest.update(f"\n{place} {array.dtype.str} {array.shape}\n".encode())
        for first in range(0, len(array), step := _rows_per_block(array)):
            digest.update(array[first : first + step].tobytes())
    return digest.hexdigest()


def _rows_per_block(array: NDArray[Any]) -> int:
    return max(1, _BYTES_PER_BLOCK // max(1, array.itemsize * math.prod(array.shape[1:])))


def _split_from_arrays(
    features: CsrRows | SparseMatrix | NDArray[Any] | Sequence[str],
    labels: CsrRows | SparseMatrix,
    where: str,
) -> tuple[Kind, Split]:
    if not isinstance(labels, CsrRows):
        if not scipy.sparse.issparse(labels):
            raise DataError(
                f"{where} labels must be a sparse matrix [instance, label], found {type(labels).__name__}; "
                "wrap it in scipy.sparse.csr_array"
            )
        labels = CsrRows.from_scipy(labels, f"{where} labels")
    rows = label_rows(labels, f"{where} labels")
    if isinstance(features, CsrRows):
        return "sparse", Split(rows, features)
    if scipy.sparse.issparse(features):
        return "sparse", Split(rows, CsrRows.from_scipy(features, f"{where} features"))
    if isinstance(features, np.ndarray) and features.dtype.kind in "fiub":
        check_dense(features, f"{where} features")
        return "dense", Split(rows, features)
    return "text", Split(rows, texts=text_column(features, f"{where} texts"))


def text_column(texts: Iterable[str], where: str) -> TextColumn:
    """Encode strings that a caller gave.

    Raises:
        DataError: One is no string, or not valid Unicode.
    """
    strings = list(texts)
    for row, text in enumerate(strings):
        if not isinstance(text, str):
            raise DataError(f"{where} must be strings, found {type(text).__name__} in row {row}; convert it")
    try:
        return TextColumn.from_strings(strings)
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} must be valid Unicode, found {error.object!r}; remove the surrogate"
        ) from None
