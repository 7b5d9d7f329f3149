"""The real data sets: counts of their published tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xmlc.data import open_dataset
from xmlc.data.describe import describe
from xmlc.data.reader.files import Reading
from xmlc.data.reader.matrix import read_labels
from xmlc.data.reader.sparse_text import read_pairs
from xmlc.data.reader.spool import Scratch

Shared = Callable[[str], Path]

pytestmark = pytest.mark.shared_data


@pytest.mark.parametrize(
    ("name", "train", "test", "features", "labels", "per_instance"),
    [
        ("bibtex", 4880, 2515, 1836, 159, 2.40),
        ("delicious", 12920, 3185, 500, 983, 19.02),
        ("corel5k", 4500, 500, 499, 374, 3.52),
        ("debian-tags-mini", 2000, 500, 0, 376, 5.47),
        ("yso-mini", 4000, 1000, 0, 1030, 1.89),
        ("wordnet-related", 93217, 23130, 0, 103467, 3.01),
        ("debian-related", 55707, 13558, 0, 45662, 5.34),
    ],
)
def test_counts_are_those_of_the_table(
    shared: Shared,
    cache: Path,
    name: str,
    train: int,
    test: int,
    features: int,
    labels: int,
    per_instance: float,
) -> None:
    dataset = open_dataset(shared(name))
    assert dataset.test is not None
    assert (dataset.train.instances, dataset.test.instances) == (train, test)
    assert (dataset.feature_count, dataset.label_count) == (features, labels)
    positives = len(dataset.train.labels.indices) + len(dataset.test.labels.indices)
    assert positives / (train + test) == pytest.approx(per_instance, abs=0.005)
    assert not dataset.warnings


def test_delicious_has_instances_without_labels(shared: Shared, cache: Path) -> None:
    described = describe(open_dataset(shared("delicious")))
    assert described["train"]["without_labels"] == 10
    assert described["test"]["without_labels"] == 4


def test_an_instance_of_wordnet_is_filtered_as_its_own_label(shared: Shared, cache: Path) -> None:
    dataset = open_dataset(shared("wordnet-related"))
    pairs, texts = dataset.train.filter_pairs, dataset.train.texts
    assert pairs is not None
    assert texts is not None
    assert dataset.label_texts is not None
    for row in range(100):
        for label in pairs.indices[pairs.offsets[row] : pairs.offsets[row + 1]]:
            assert texts[row] == dataset.label_texts[int(label)]


def test_official_matrices_and_filters_are_read_at_their_size(shared: Shared, scratch: Scratch) -> None:
    folder = shared("lf-amazontitles-131k-partial")
    labels = read_labels(folder / "tst_X_Y.txt.gz", scratch, Reading())
    assert (labels.rows, labels.columns) == (134_835, 131_073)
    assert len(labels.indices) / labels.rows == pytest.approx(2.11, abs=0.005)
    assert labels.take(np.array([0])).indices.tolist() == [42537, 43834]
    for name, instances in (("tst_filter_labels.txt.gz", 134_835), ("trn_filter_labels.txt.gz", 294_805)):
        pairs = read_pairs(folder / name, instances, 131_073, Reading())
        assert pairs.rows == instances
        assert len(pairs.indices) > 30_000


def test_the_shipped_subset_is_part_of_the_whole(shared: Shared, cache: Path) -> None:
    whole, mini = open_dataset(shared("wordnet-related")), open_dataset("wordnet-mini")
    assert whole.train.texts is not None
    assert mini.train.texts is not None
    digests = {hashlib.sha1(text).digest() for text in whole.train.texts.blobs()}
    assert all(hashlib.sha1(text).digest() in digests for text in mini.train.texts.blobs())
