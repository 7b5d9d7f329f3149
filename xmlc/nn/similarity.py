"""Likeness of texts beside a trained model: to the labels' texts, to training instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray

from xmlc import native
from xmlc.config import SimilarityConfig
from xmlc.data.rows import CsrRows, unit_length
from xmlc.errors import DataError
from xmlc.ops import LogitOffsets

TEXT_LABELS = 500
"""How many labels of the likest texts an instance's logits are raised for."""
INSTANCES_AT_ONCE = 64
"""Instances of a thread; their products with all texts are nearly dense."""


@dataclass(frozen=True, eq=False)
class Similarity:
    """What is added to the logits when labels are ranked, never in training, with all rows of unit length::

        logits[l, b] += text_weight * <features[b], texts[l]>
        logits[l, b] += neighbour_weight * sum over near i of <features[b], instances[i]>^2 * labels[i, l]

    ``near`` are the ``neighbours`` training instances of the highest products with b; of the texts, those of
    the `TEXT_LABELS` highest products count. Nothing here is trained.
    """

    config: SimilarityConfig
    texts: CsrRows
    """[feature, label]; without entries where they have no weight, as the next two."""
    instances: CsrRows
    """[feature, instance]"""
    labels: CsrRows
    """[instance, label]"""

    @classmethod
    def of(
        cls, config: SimilarityConfig, texts: CsrRows | None, instances: CsrRows, labels: CsrRows
    ) -> Similarity:
        """Keep what the weights of ``config`` ask for.

        Args:
            config: Weights and number of neighbours.
            texts: Features of the labels' texts [label, feature], or None where there are none.
            instances: Features of the instances that are trained on, [instance, feature].
            labels: Theirs, [instance, label].
        """
        if texts is None or config.text_weight == 0.0:
            texts = CsrRows.empty(labels.columns, instances.columns)
        if config.neighbour_weight == 0.0:
            instances, labels = (CsrRows.empty(0, each.columns) for each in (instances, labels))
        return cls(config, unit_length(texts).transposed(), unit_length(instances).transposed(), labels)

    def offsets(self, features: CsrRows) -> LogitOffsets:
        """Return the sums for a batch [batch, feature] as entries by rising label."""
        queries = unit_length(features).to_scipy()
        firsts = range(0, queries.shape[0], INSTANCES_AT_ONCE)
        parts = [(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))]
        # SciPy's products and NumPy's partitions let go of the interpreter's lock.
        with ThreadPoolExecutor(
            native.threads_for(len(self.texts.indices) + len(self.instances.indices))
        ) as threads:
            scored = threads.map(
                lambda first: list(self._scores(queries[first : first + INSTANCES_AT_ONCE])), firsts
            )
            for first, terms in zip(firsts, scored, strict=True):
                for scores in terms:
                    instance = np.repeat(np.arange(first, first + scores.shape[0]), np.diff(scores.indptr))
                    parts.append((scores.indices, instance.astype(np.int32), scores.data))
        label, instance, value = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(label, kind="stable")
        return LogitOffsets.of(*(torch.from_numpy(column[order]) for column in (label, instance, value)))

    def _scores(self, queries: scipy.sparse.csr_matrix) -> Iterator[scipy.sparse.csr_matrix]:
        """Give the terms of the sum, [query, label] each."""
        config = self.config
        texts, instances, labels = self._matrices
        yield config.text_weight * _highest(queries @ texts, TEXT_LABELS)
        near = _highest(queries @ instances, config.neighbours)
        yield config.neighbour_weight * (near.power(2) @ labels)

    @cached_property
    def _matrices(self) -> tuple[scipy.sparse.csr_matrix, ...]:
        return self.texts.to_scipy(), self.instances.to_scipy(), self.labels.to_scipy()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint keeps, by name."""
        return {
            f"{name}.{part}": value
            for name in _MATRICES
            for part, value in _parts(getattr(self, name)).items()
        }

    @classmethod
    def from_arrays(
        cls, config: SimilarityConfig, arrays: Mapping[str, NDArray[Any]], feature: int, label: int
    ) -> Similarity:
        """Return what `arrays` was taken of.

        Raises:
            DataError: They are no matrices of these numbers of features and labels.
            KeyError: One is missing.
        """
        instance = len(arrays["labels.offsets"]) - 1
        shapes = {"texts": (feature, label), "instances": (feature, instance), "labels": (instance, label)}
        return cls(config, **{name: _matrix(name, arrays, shape) for name, shape in shapes.items()})


_MATRICES = ("texts", "instances", "labels")


def _parts(rows: CsrRows) -> dict[str, NDArray[Any]]:
    parts: dict[str, NDArray[Any]] = {"offsets": rows.offsets, "indices": rows.indices}
    return parts if rows.values is None else parts | {"values": rows.values}


def _matrix(name: str, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, int]) -> CsrRows:
    """Return one matrix, with all its indices checked: a checkpoint may come from elsewhere."""
    offsets, indices = arrays[f"{name}.offsets"], arrays[f"{name}.indices"]
    values = arrays.get(f"{name}.values", np.ones(len(indices), np.float32))
    where = f"similarity.{name}"
    found = [array.dtype.name for array in (offsets, indices, values)]
    if found != ["int64", "int32", "float32"]:
        raise DataError(f"{where}: must be int64 offsets, int32 indices and float32 values, found {found}")
    try:
        matrix = scipy.sparse.csr_matrix((values, indices, offsets), shape=shape)
    except ValueError as error:
        raise DataError(f"{where}: must be a matrix {list(shape)}, found: {error}") from None
    return CsrRows.from_scipy(matrix, where)


def _highest(matrix: scipy.sparse.csr_matrix, most: int) -> scipy.sparse.csr_matrix:
    """Keep the highest values of every row, at most so many; ties go to the lowest column."""
    offsets, columns, values = [0], [], []
    for first, end in pairwise(matrix.indptr):
        row_columns, row_values = matrix.indices[first:end], matrix.data[first:end]
        if len(row_values) > most:
            least = np.partition(row_values, -most)[-most]
            kept = np.flatnonzero(row_values >= least)
            kept = kept[np.lexsort((row_columns[kept], -row_values[kept]))[:most]]
            row_columns, row_values = row_columns[kept], row_values[kept]
        columns.append(row_columns)
        values.append(row_values)
        offsets.append(offsets[-1] + len(row_columns))
    empty = [np.empty(0, matrix.dtype)]
    return scipy.sparse.csr_matrix(
        (np.concatenate(values or empty), np.concatenate(columns or [np.empty(0, np.int32)]), offsets),
        shape=matrix.shape,
    )
