"""Figures of a data set, against counts by hand."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from xmlc.data import Dataset
from xmlc.data.describe import describe

LABELS = scipy.sparse.csr_array(np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]]))
TEST_LABELS = scipy.sparse.csr_array(np.array([[0, 0, 1], [1, 0, 0], [0, 0, 0]]))
DENSE = np.array([[1.0, 0], [0, 2], [0, 0]])
TEST_DENSE = np.array([[0.0, 2], [0, 0], [5, 5]])


def make(features: Any, test_features: Any) -> dict[str, Any]:
    dataset = Dataset.from_arrays(features, LABELS, test_features=test_features, test_labels=TEST_LABELS)
    return describe(dataset)


def test_labels_are_counted_over_training_instances() -> None:
    described = make(DENSE, TEST_DENSE)
    assert described["labels"] == {
        "count": 3,
        "training_instances": {"mean": 1.0, "median": 1.0, "max": 2},
        "share_with_0": pytest.approx(1 / 3),
        "share_with_1": pytest.approx(1 / 3),
        "share_with_at_most_5": 1.0,
        "share_of_positives_in_tenth": pytest.approx(2 / 3),
    }
    assert described["train"]["labels_per_instance"] == {"mean": 1.0, "median": 1.0, "max": 2}
    assert described["train"]["without_labels"] == 1
    assert described["test"]["without_labels"] == 1
    assert described["test"]["labels_without_training"] == 1


@pytest.mark.parametrize("labels", [1, 2, 3, 4, 5, 6, 7])
def test_labels_without_instances_count_in_mean_and_median(labels: int) -> None:
    matrix = np.zeros((9, labels), np.int64)
    matrix[:7, 0] = matrix[:4, labels // 2] = matrix[:2, labels - 1] = 1
    described = describe(Dataset.from_arrays(np.ones((9, 1)), scipy.sparse.csr_array(matrix)))["labels"]
    counts = matrix.sum(0)
    assert described["training_instances"] == {
        "mean": pytest.approx(counts.mean()),
        "median": np.median(counts),
        "max": 7,
    }
    assert described["share_with_0"] == np.mean(counts == 0)
    assert described["share_with_at_most_5"] == np.mean(counts <= 5)


def test_two_thousand_million_labels_take_no_memory() -> None:
    """A header may promise as many; counting each took 16 GB."""
    labels = scipy.sparse.csr_array(([1.0], ([0], [5])), shape=(1, 2**31 - 1))
    dataset = Dataset.from_arrays(np.ones((1, 1)), labels)
    tracemalloc.start()
    described = describe(dataset)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert described["labels"]["training_instances"]["max"] == 1


@pytest.mark.parametrize(
    ("features", "test_features", "gap", "seen"),
    [
        (["a", "b", ""], ["b", "", "c"], "without_text", 1),
        (scipy.sparse.csr_array(DENSE), scipy.sparse.csr_array(TEST_DENSE), "without_features", 1),
    ],
)
def test_empty_instances_are_counted_and_never_count_as_seen(
    features: Any, test_features: Any, gap: str, seen: int
) -> None:
    described = make(features, test_features)
    assert described["train"][gap] == 1
    assert described["test"][gap] == 1
    assert described["test"]["seen_in_training"] == seen


def test_texts_have_no_number_of_features() -> None:
    assert "features" not in make(["a", "b", ""], ["b", "", "c"])
    assert make(DENSE, TEST_DENSE)["features"] == 2


@pytest.mark.parametrize(
    "features", [["a", "a", ""], scipy.sparse.csr_array(DENSE[[0, 0, 2]]), DENSE[[1, 1, 0]]]
)
def test_training_instances_that_occur_again_are_counted(features: Any) -> None:
    assert describe(Dataset.from_arrays(features, LABELS))["train"]["repeated"] == 1


def test_dense_instances_are_compared_bit_by_bit() -> None:
    assert make(DENSE, TEST_DENSE)["test"]["seen_in_training"] == 2


def test_the_description_is_plain_json() -> None:
    described = make(DENSE, TEST_DENSE)
    assert json.loads(json.dumps(described)) == described
    assert described["propensity_a"] == 0.55
    assert len(described["fingerprint"]) == 32


def test_a_data_set_without_test_has_no_test_figures() -> None:
    assert "test" not in describe(Dataset.from_arrays(DENSE, LABELS))
