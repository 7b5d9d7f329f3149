"""Batches of instances in an order that any epoch and step can be resumed at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xmlc.data.dataset import Features, row_count
from xmlc.data.rows import CsrRows, Float32, Int64, TokenRows
from xmlc.errors import DataError

_HOLDOUT_STREAM = 2**64 - 1  # the second key word of the hold-out; epochs count from 0 and never reach it
_SAMPLE_STREAM = 2**64 - 2  # likewise, of the instances that are trained on
_BATCHES_SORTED = 64  # whose texts are brought together by length

Rows = CsrRows | TokenRows | Float32


class Column(Protocol):
    """What an instance is to the encoder, made or gathered when a batch asks for it."""

    def __len__(self) -> int: ...

    def take(self, rows: Int64) -> Rows:
        """Return the given rows, in their order."""
        ...


@dataclass(frozen=True, eq=False)
class Span:
    """Some consecutive rows of a column."""

    column: CsrRows | Column
    first: int
    rows: int

    def __len__(self) -> int:
        return self.rows

    def take(self, rows: Int64) -> Rows:
        """Return the given rows, counted from the span's first."""
        return self.column.take(rows + self.first)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some instances with their features and labels, all in one order."""

    instances: Int64  # [batch], rows of the split, then label documents
    features: Rows  # [batch, feature], dense [batch, hidden], or the texts' tokens
    labels: CsrRows  # [batch, label]
    skipped: CsrRows | None = None  # [batch, label], neither positives nor negatives
    words: CsrRows | None = None  # [batch, word], where features are not what direct connections see
    negatives: CsrRows | None = None  # [batch, label], mined for a two-tower model


@dataclass(frozen=True, eq=False)
class BatchStream:
    """The chosen rows of a split, in batches; the last batch of an epoch is as short as it comes.

    Batches of tokens hold texts of about one length: 64 consecutive batches of the epoch's random order share
    their texts out by length, and come in a random order again.
    """

    features: Features | Column  # [instance, feature], dense [instance, hidden] of any real dtype, or texts
    labels: CsrRows  # [instance, label]
    rows: Int64  # [chosen]
    batch_size: int
    seed: int
    skipped: CsrRows | None = None  # [instance, label]
    words: CsrRows | None = None  # [instance, word]
    negatives: CsrRows | None = None  # [instance, label]
    part: tuple[int, int] = (0, 1)
    """Which part of every batch is given, and of how many: a worker's, empty of the shortest batches."""

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
        generator = _generator(self.seed, number)
        order = generator.permutation(self.rows)
        if isinstance(self.features, TokenRows):
            order = _by_length(order, self.features.lengths, self.batch_size, generator)
        yield from self._batches(order, start)

    def sequential(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches in the order of ``rows``, from position ``start``."""
        yield from self._batches(self.rows, start)

    def _batches(self, order: Int64, start: int) -> Iterator[Batch]:
        for first in range(start * self.batch_size, len(order), self.batch_size):
            instances = order[first : first + self.batch_size]
            if self.part != (0, 1):
                instances = instances[_part(len(instances), *self.part)]
            yield Batch(
                instances,
                take(self.features, instances),
                self.labels.take(instances),
                *(
                    None if each is None else each.take(instances)
                    for each in (self.skipped, self.words, self.negatives)
                ),
            )


def _part(rows: int, number: int, parts: int) -> slice:
    return slice(rows * number // parts, rows * (number + 1) // parts)


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


def sample(rows: Int64, fraction: float, seed: int) -> Int64:
    """Return a share of the rows, rounded, at random and in their order; of some rows at least one."""
    if fraction == 1.0 or len(rows) == 0:
        return rows
    kept = max(round(len(rows) * fraction), 1)
    return np.sort(_generator(seed, _SAMPLE_STREAM).permutation(rows)[:kept])


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


def _by_length(order: Int64, lengths: Int64, batch_size: int, generator: np.random.Generator) -> Int64:
    """Bring texts of about one length together within runs of batches; the short batch stays as it is."""
    full = len(order) // batch_size * batch_size
    parts = [order[full:]]
    for first in range(0, full, _BATCHES_SORTED * batch_size):
        run = order[first : min(first + _BATCHES_SORTED * batch_size, full)]
        batches = run[np.argsort(lengths[run], kind="stable")].reshape(-1, batch_size)
        parts.insert(-1, generator.permutation(batches).reshape(-1))
    return np.concatenate(parts)


def take(features: Features | Column, rows: Int64) -> Rows:
    """Return some rows of features or of a column."""
    if isinstance(features, np.ndarray):
        return np.asarray(features[rows], dtype=np.float32)
    return features.take(rows)
