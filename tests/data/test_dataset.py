"""Data sets in memory: what fits together and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse

from xmlc.data import CsrRows, Dataset
from xmlc.data.dataset import arrays_of, content_fingerprint
from xmlc.errors import DataError

LABELS = scipy.sparse.csr_array(np.array([[1, 0, 1], [0, 0, 0]]))
DENSE = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.mark.parametrize(
    ("features", "kind", "columns"),
    [
        (DENSE, "dense", 2),
        (DENSE.astype(np.int16), "dense", 2),
        (scipy.sparse.csc_matrix(DENSE), "sparse", 2),
        (CsrRows.from_scipy(scipy.sparse.csr_array(DENSE), "f"), "sparse", 2),
        (["a text", ""], "text", 0),
        (np.array(["a text", ""]), "text", 0),
    ],
)
def test_features_choose_the_kind(features: Any, kind: str, columns: int) -> None:
    dataset = Dataset.from_arrays(features, LABELS, label_names=["a", "b", "c"])
    assert (dataset.kind, dataset.feature_count, dataset.label_count) == (kind, columns, 3)
    assert dataset.train.instances == 2
    assert dataset.train.labels.indices.tolist() == [0, 2]
    assert dataset.train.labels.values is None
    assert len(dataset.fingerprint) == 32


def test_a_test_split_comes_along() -> None:
    dataset = Dataset.from_arrays(
        DENSE, LABELS, test_features=DENSE[:1], test_labels=LABELS[:1], propensity_a=0.6
    )
    assert dataset.test is not None
    assert dataset.test.instances == 1
    assert dataset.propensity_a == 0.6


@pytest.mark.parametrize(
    ("features", "labels", "more", "found"),
    [
        (
            DENSE[:1],
            LABELS,
            {},
            r"training features must have a row for each of the 2 rows of labels, found 1",
        ),
        (DENSE, LABELS, {"label_names": ["a"]}, r"label_names must have 3 rows, one for each label, found 1"),
        (DENSE, LABELS, {"test_features": DENSE}, r"must be given together, found one alone"),
        (
            DENSE,
            LABELS,
            {"test_features": ["a", "b"], "test_labels": LABELS},
            r"one kind, found dense and text",
        ),
        (
            DENSE,
            LABELS,
            {"test_features": DENSE[:, :1], "test_labels": LABELS},
            r"same features, found 2 .* and 1",
        ),
        (
            DENSE,
            LABELS,
            {"test_features": DENSE, "test_labels": LABELS[:, :2]},
            r"same labels, found 3 .* and 2",
        ),
        (DENSE, LABELS.toarray(), {}, r"labels must be a sparse matrix \[instance, label\], found ndarray"),
        (DENSE, -LABELS, {}, r"the relevance of a label must be 0 or more, found -1.0 for label 0 in row 0"),
        (
            DENSE * np.nan,
            LABELS,
            {},
            r"training features: features must be finite in float32, found nan in row 0",
        ),
        (
            DENSE[0],
            LABELS,
            {},
            r"must be a real matrix \[instance, hidden\], found dtype float32 with shape \[2\]",
        ),
        (["a", 5], LABELS, {}, r"training texts must be strings, found int in row 1"),
        (["a", "\ud800"], LABELS, {}, r"training texts must be valid Unicode"),
        (DENSE[:0], LABELS[:0], {}, r"at least one instance and one label, found 0 instances"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    features: Any, labels: Any, more: dict[str, Any], found: str
) -> None:
    with pytest.raises(DataError, match=found):
        Dataset.from_arrays(features, labels, **more)


def test_the_fingerprint_is_of_the_content_alone() -> None:
    first = Dataset.from_arrays(DENSE, LABELS, name="one")
    assert first.fingerprint == Dataset.from_arrays(DENSE.copy(), LABELS, name="two").fingerprint
    assert first.fingerprint != Dataset.from_arrays(DENSE + 1, LABELS).fingerprint
    assert first.fingerprint != Dataset.from_arrays(DENSE, LABELS[:, [1, 0, 2]]).fingerprint
    assert first.fingerprint != Dataset.from_arrays(DENSE.astype(np.float64), LABELS).fingerprint
    assert first.fingerprint == content_fingerprint(first)


def test_every_array_has_its_place() -> None:
    dataset = Dataset.from_arrays(["a", "b"], LABELS, label_names=["x", "y", "z"])
    assert sorted(arrays_of(dataset)) == [
        "label_names.data",
        "label_names.offsets",
        "train.labels.indices",
        "train.labels.offsets",
        "train.texts.data",
        "train.texts.offsets",
    ]
