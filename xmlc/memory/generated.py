"""A data set of any number of labels, to measure memory on: few instances, labels of power-law frequency."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from xmlc.data import CsrRows, Dataset
from xmlc.data.dataset import Split
from xmlc.data.rows import offsets_of

POSITIVES = 5
"""Labels of an instance."""


def generated_dataset(
    labels: int, features: int, words: int | None, instances: int, seed: int = 0
) -> Dataset:
    """Draw a data set.

    Args:
        labels: Labels; that of frequency rank r has a probability of about 1 / r.
        features: Columns of the features.
        words: Features of an instance that are not zero, drawn like labels; None makes dense features.
        instances: Training instances.
        seed: Another seed draws others.
    """
    generator = np.random.default_rng(seed)
    columns: CsrRows | NDArray[np.float32]
    if words is None:
        columns = generator.standard_normal((instances, features), np.float32)
    else:
        columns = _drawn(generator, instances, features, min(words, features))
    return Dataset(
        name=f"generated-{labels}",
        kind="dense" if words is None else "sparse",
        train=Split(_drawn(generator, instances, labels, min(POSITIVES, labels)), columns),
        test=None,
        label_count=labels,
        feature_count=features,
        fingerprint=f"generated {labels} {features} {words} {instances} {seed}",
    )


def generated_texts(labels: int, words: int, instances: int) -> Dataset:
    """Draw a data set of texts of instances and labels; a label's is two words."""
    drawn = generated_dataset(labels, 4 * labels, words, instances)
    columns = drawn.train.features
    assert isinstance(columns, CsrRows), "of words"
    ends = columns.offsets.tolist()
    return Dataset.from_arrays(
        [
            " ".join(f"word{word}" for word in columns.indices[a:b].tolist())
            for a, b in itertools.pairwise(ends)
        ],
        drawn.train.labels.to_scipy(),
        label_texts=[f"word{label} word{2 * label}" for label in range(labels)],
        name=f"generated-texts-{labels}",
    )


def word_shares(features: int, words: int) -> NDArray[np.float64]:
    """Return the expected share of instances in which each word stands, by rank. [feature]"""
    ranks = np.arange(1.0, features + 1.0)
    share = np.log1p(1.0 / ranks) / np.log(max(features, 2))  # the last rank's is that of the one beyond
    return 1.0 - (1.0 - np.minimum(share, 1.0)) ** min(words, features)


def _drawn(generator: np.random.Generator, rows: int, columns: int, count: int) -> CsrRows:
    """Draw about ``count`` distinct columns for every row by Zipf's law; values are 1."""
    ranks = (columns ** generator.random((rows, count)) - 1.0).astype(np.int64)
    drawn = np.sort(np.minimum(ranks * 7919 % columns, columns - 1), axis=1)  # frequent ones lie anywhere
    first = np.ones(drawn.shape, bool)
    first[:, 1:] = drawn[:, 1:] > drawn[:, :-1]
    return CsrRows(offsets_of(first.sum(1)), drawn[first].astype(np.int32), None, columns)
