"""What a step brings together, as far as the data tell: expected numbers, no draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmlc.memory.activations import EncoderMemory, TowerPasses

BIN_STEP = 1.05
"""Shares within so much of each other are taken for one, so that many columns take little room."""
_LEAST_SHARE = 1e-12


@dataclass(frozen=True, eq=False)
class Occurrences:
    """In which share of the rows of some sources each of many columns stands, in bins of like columns."""

    shares: NDArray[np.float64]  # [source, bin]
    columns: NDArray[np.int64]  # [bin], how many are in a bin

    @classmethod
    def of(cls, *shares: NDArray[np.float64]) -> Occurrences:
        """Bin columns by their shares of several sources, [column] each, all within [0, 1]."""
        key = np.zeros(len(shares[0]), np.int64)
        for share in shares:
            place = np.rint(np.log(np.maximum(share, _LEAST_SHARE)) / np.log(BIN_STEP)).astype(np.int64)
            key = key * 1024 - place  # a place lies in [-566, 0]
        _, bins, columns = np.unique(key, return_inverse=True, return_counts=True)
        sums = [np.bincount(bins, weights=share, minlength=len(columns)) for share in shares]
        return cls(np.stack(sums) / columns, columns)

    def expected(self, *rows: int) -> int:
        """Return how many columns stand in at least one of so many rows of each source::

        sum over columns of 1 - product over sources of (1 - share) ** rows
        """
        absent = np.ones(len(self.columns))
        for share, count in zip(self.shares, rows, strict=True):
            absent *= (1.0 - share) ** count
        return round(float(((1.0 - absent) * self.columns).sum()))


def shares_of(columns: NDArray[np.int32], count: int, rows: int) -> NDArray[np.float64]:
    """Return the share of the rows in which each of ``count`` columns stands; compressed rows. [column]"""
    found = np.zeros(count)
    for first in range(0, len(columns), step := max(1 << 20, count)):
        found += np.bincount(columns[first : first + step], minlength=count)
    return found / max(rows, 1)


@dataclass(frozen=True, eq=False)
class TowerTexts:
    """What the plan of two towers asks of the data beside `Batches`."""

    pool: Occurrences
    """Of the labels, by source: positives that an instance brings, negatives that it brings, random draws."""
    instances: int
    """That are trained on, and for which negatives are mined."""
    label_words: float
    """Features of a label's text that are not zero."""
    words: Occurrences
    """Of the features, by source: instances, labels. No columns where the encoder is no bag of words."""
    stored_bytes: int
    """Of texts, names and vocabulary that a checkpoint copies before it writes them."""
    kept_labels_bytes: int
    """Of the training labels without their filter pairs, where there are such pairs."""
    labels: EncoderMemory | None
    """Of a transformer that reads the labels' texts, the longest as long as the longest of these."""
    instance_passes: TowerPasses | None
    """Where a transformer is trained."""
    label_passes: TowerPasses | None
