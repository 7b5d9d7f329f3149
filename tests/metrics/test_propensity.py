"""Inverse propensities against recorded values, hand values and the limits of the model."""

import json
from pathlib import Path

import numpy as np
import pytest

from xmlc.errors import ConfigError, DataError
from xmlc.metrics import inverse_propensity

ORACLE = Path(__file__).parents[1] / "data" / "metrics-oracle"
RECORDED = json.loads((ORACLE / "values.json").read_text())


@pytest.mark.parametrize("case", RECORDED)
def test_inverse_propensity_equals_the_recorded_values(case: str) -> None:
    arrays = np.load(ORACLE / f"{case}.npz")
    counts = np.bincount(arrays["train_indices"], minlength=arrays["shape"][1])
    instances = len(arrays["train_indptr"]) - 1

    found = inverse_propensity(counts, instances, RECORDED[case]["A"], RECORDED[case]["B"])

    # The recording itself differs from float64 by up to 3.6e-7 (it passed through float32).
    np.testing.assert_allclose(found, arrays["inverse_propensity"], rtol=0, atol=1e-6)


def test_inverse_propensity_follows_the_formula_by_hand() -> None:
    # C = (ln 1000 - 1) * 4^0.5, and N_l + b is 3, 4 and 16.
    found = inverse_propensity(np.array([0, 1, 13]), 1000, 0.5, 3.0)

    scale = (np.log(1000) - 1) * 2
    np.testing.assert_allclose(found, [1 + scale / np.sqrt(3), 1 + scale / 2, 1 + scale / 4], rtol=1e-15)


def test_rarer_labels_have_larger_inverse_propensity() -> None:
    found = inverse_propensity(np.arange(1000), 1000, 0.55, 1.5)

    assert (np.diff(found) < 0).all()
    assert (found >= 1).all()


@pytest.mark.parametrize("instances", [1, 2])
def test_with_one_or_two_instances_every_label_has_propensity_one(instances: int) -> None:
    found = inverse_propensity(np.arange(instances + 1), instances, 0.55, 1.5)

    np.testing.assert_array_equal(found, 1.0)


def test_no_labels_give_no_propensities() -> None:
    assert inverse_propensity(np.zeros(0, dtype=np.int64), 10, 0.55, 1.5).shape == (0,)


@pytest.mark.parametrize(
    ("counts", "instances"),
    [
        (np.array([1, -1]), 10),
        (np.array([1, 11]), 10),
        (np.array([1.0, 2.0]), 10),
        (np.array([[1, 2]]), 10),
        (np.array([0, 0]), 0),
    ],
    ids=["negative", "above instances", "float", "matrix", "no instance"],
)
def test_impossible_counts_are_refused(counts: np.ndarray, instances: int) -> None:
    with pytest.raises(DataError, match="propensity: "):
        inverse_propensity(counts, instances, 0.55, 1.5)


@pytest.mark.parametrize(("a", "b"), [(-0.1, 1.5), (0.55, 0.0), (0.55, -1.0), (np.nan, 1.5), (0.55, np.inf)])
def test_a_and_b_outside_the_model_are_refused(a: float, b: float) -> None:
    with pytest.raises(ConfigError, match="a must be at least 0 and b above 0"):
        inverse_propensity(np.array([1]), 10, a, b)


@pytest.mark.parametrize(("a", "b"), [(1e300, 1.5), (2000.0, 1.5), (2.0, 1e-320)])
def test_constants_beyond_all_measure_are_refused(a: float, b: float) -> None:
    """They once ended in an OverflowError, or in metrics that are no numbers."""
    with pytest.raises(ConfigError, match="must give finite propensities"):
        inverse_propensity(np.array([0, 3]), 100, a, b)
