"""Filter files: (instance, label) pairs that evaluation masks, such as an item as its own label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from xmlc.data.dataset import Dataset, Split
from xmlc.data.reader.files import Reading, find
from xmlc.data.reader.sparse_text import read_pairs
from xmlc.errors import DataError

TRAIN_NAMES = ("filter_labels_train.txt", "trn_filter_labels.txt")
TEST_NAMES = ("filter_labels_test.txt", "tst_filter_labels.txt")
FILES = TRAIN_NAMES + TEST_NAMES


def with_filters(dataset: Dataset, folder: Path, reading: Reading) -> Dataset:
    """Return the data set with the pairs of the folder's filter files, where it has any.

    Raises:
        DataError: A pair is malformed or out of range, or there are two files for one split.
    """
    train = _filtered(dataset.train, folder, TRAIN_NAMES, reading)
    test = None if dataset.test is None else _filtered(dataset.test, folder, TEST_NAMES, reading)
    return replace(dataset, train=train, test=test)


def _filtered(split: Split, folder: Path, names: tuple[str, ...], reading: Reading) -> Split:
    paths = [path for name in names if (path := find(folder, name)) is not None]
    if len(paths) > 1:
        raise DataError(
            f"{folder}: must hold one of {paths[0].name} and {paths[1].name}, found both; remove one"
        )
    if not paths:
        return split
    return replace(split, filter_pairs=read_pairs(paths[0], split.instances, split.labels.columns, reading))
