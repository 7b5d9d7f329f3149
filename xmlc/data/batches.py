"""Batches of instances in an order that any epoch and step can be resumed at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmlc.data.dataset import Features, row_count
from xmlc.data.rows import CsrRows, Float32, Int64
from xmlc.errors import DataError

_HOLDOUT_STREAM = 2**64 - 1  # the second key word of the hold-out; epochs count from 0 and never reach it


@dataclass(frozen=True, eq=False)
class Batch:
    """Some instances with their features and labels, all in one order."""

    instances: Int64  # [batch], rows of the split, then label documents
    features: CsrRows | Float32  # [batch, feature], or dense [batch, hidden]
    labels: CsrRows  # [batch, label]


@dataclass(frozen=True, eq=False)
class BatchStream:
    """The chosen rows of a split, in batches; the last batch of an epoch is as short as it comes."""

    features: Features  # [instance, feature], or dense [instance, hidden] of any real dtype
    labels: CsrRows  # [instance, label]
    rows: Int64  # [chosen]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if row_count(self.features) != self.labels.rows:
            raise DataError(
                "batches: features and labels must have equally many rows, found "
                f"{row_count(self.features)} and {self.labels.rows}; pass those of one split"
            )

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return math.ceil(len(self.rows) / self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from position ``start``; seed and epoch decide the order."""
        yield from self._batches(_generator(self.seed, number).permutation(self.rows), start)

    def sequential(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches in the order of ``rows``, from position ``start``."""
        yield from self._batches(self.rows, start)

    def _batches(self, order: Int64, start: int) -> Iterator[Batch]:
        for first in range(start * self.batch_size, len(order), self.batch_size):
            instances = order[first : first + self.batch_size]
            yield Batch(instances, _take(self.features, instances), self.labels.take(instances))


def holdout(instances: int, fraction: float, seed: int) -> tuple[Int64, Int64]:
    """Split ``range(instances)`` at random into training and validation rows.

    Returns:
        Both sorted and disjoint, together all rows. With a fraction above 0 and at least two instances, each
        holds at least one row; a single instance is for training.
    """
    validation = 0
    if fraction > 0 and instances > 1:
        validation = min(max(round(instances * fraction), 1), instances - 1)
    order = _generator(seed, _HOLDOUT_STREAM).permutation(instances)
    return np.sort(order[validation:]), np.sort(order[:validation])


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


def _take(features: Features, rows: Int64) -> CsrRows | NDArray[np.float32]:
    if isinstance(features, CsrRows):
        return features.take(rows)
    return np.asarray(features[rows], dtype=np.float32)
