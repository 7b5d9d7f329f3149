"""The scikit-learn style estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score

from xmlc import XmlcClassifier
from xmlc.errors import CheckpointError, ConfigError, DataError

SETTINGS: dict[str, Any] = problems.config(training={"epochs": 8}).model_dump(mode="json")


@pytest.fixture(scope="module", params=problems.KINDS)
def fitted(request: pytest.FixtureRequest) -> tuple[XmlcClassifier, problems.Split]:
    """An estimator of each kind of features, and instances that it has not seen."""
    part = problems.split(request.param, 200, 1)
    return XmlcClassifier(SETTINGS).fit(part.features, part.labels), problems.split(request.param, 50, 2)


def test_it_learns(fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    assert estimator.score(unseen.features, unseen.labels) > 0.7


def test_predict_returns_labels_best_first(fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    labels = estimator.predict(unseen.features, k=4)
    assert labels.shape == (50, 4)
    assert labels.dtype == np.int64
    assert estimator.predict(unseen.features).shape == (50, 5)
    np.testing.assert_array_equal(estimator.predict(unseen.features, k=2), labels[:, :2])


def test_scores_are_those_of_the_predicted_labels(fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    labels = estimator.predict(unseen.features, k=4)
    scores = estimator.predict_scores(unseen.features, k=4)
    assert scores.shape == (50, problems.LABELS)
    assert scores.nnz == 200
    dense = scores.toarray()
    found = np.take_along_axis(dense, labels, axis=1)
    assert (np.diff(found, axis=1) <= 0).all()
    predictions = estimator.predictor_.predict(unseen.features, k=4)
    expected = [[prediction.score for prediction in row] for row in predictions]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def test_score_is_precision_at_1(fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    best = estimator.predict(unseen.features, k=1)[:, 0]
    hits = unseen.labels.toarray()[np.arange(50), best] > 0
    assert estimator.score(unseen.features, unseen.labels) == pytest.approx(hits.mean())


def test_a_stored_zero_is_no_hit(fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    nothing = unseen.labels.copy()
    nothing.data[:] = 0
    assert estimator.score(unseen.features, nothing) == 0.0


def test_it_cannot_be_scored_on_labels_of_another_shape(
    fitted: tuple[XmlcClassifier, problems.Split],
) -> None:
    estimator, unseen = fitted
    for wrong in (unseen.labels[:, :20], unseen.labels[:49]):
        with pytest.raises(DataError, match=r"Y must be \[instance, label\] = \[50, 24\], found"):
            estimator.score(unseen.features, wrong)


@pytest.mark.parametrize("k", [0, -1, problems.LABELS + 1])
def test_k_must_be_a_number_of_labels(k: int, fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    with pytest.raises(DataError, match=rf"k must lie in \[1, label\] = \[1, 24\], found {k}"):
        estimator.predict(unseen.features, k=k)


def test_features_of_another_width_are_refused() -> None:
    for kind in ("sparse", "dense"):
        part = problems.split(kind, 60)
        estimator = XmlcClassifier(SETTINGS, epochs=1).fit(part.features, part.labels)
        width = part.features.shape[1]
        with pytest.raises(DataError, match=rf"\[instance, {width}\], found .* \[60, {width - 1}\]"):
            estimator.predict(part.features[:, 1:])


def test_features_and_labels_of_different_lengths_are_refused() -> None:
    part = problems.split("sparse", 60)
    with pytest.raises(DataError, match="the training features must have a row for each of the 60 rows"):
        XmlcClassifier(SETTINGS).fit(part.features[:50], part.labels)


def test_labels_may_come_as_an_array() -> None:
    part = problems.split("sparse", 60)
    sparse, array = (
        XmlcClassifier(SETTINGS, epochs=2).fit(part.features, labels)
        for labels in (part.labels, part.labels.toarray().astype(bool))
    )
    scores = [each.predict_scores(part.features).toarray() for each in (sparse, array)]
    np.testing.assert_array_equal(*scores)
    assert array.score(part.features, part.labels.toarray()) == sparse.score(part.features, part.labels)


@pytest.mark.parametrize("labels", [np.arange(60), [["a", "b"]] * 60, np.ones((60, 2, 2))])
def test_labels_without_a_column_each_are_refused(labels: Any) -> None:
    part = problems.split("sparse", 60)
    with pytest.raises(DataError, match=r"Y must be a sparse matrix or a numeric array .*, found"):
        XmlcClassifier(SETTINGS).fit(part.features, labels)


def test_an_unfitted_estimator_says_so() -> None:
    estimator = XmlcClassifier()
    for call in (estimator.predict, estimator.predict_scores):
        with pytest.raises(ConfigError, match="needs a fitted estimator, found none; call fit first"):
            call(["text"])
    with pytest.raises(ConfigError, match="call fit first"):
        estimator.score(["text"], scipy.sparse.csr_array((1, 1)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modle": {}}, "unknown key modle; did you mean model"),
        ({"model": 3}, "model must be a table of settings, found 3"),
        ({"model": {"fan_in": -1}}, r"model\.fan_in"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, Any], message: str) -> None:
    part = problems.split("sparse", 60)
    with pytest.raises(ConfigError, match=message):
        XmlcClassifier(config).fit(part.features, part.labels)


def test_a_wrong_number_of_epochs_is_refused() -> None:
    part = problems.split("sparse", 60)
    with pytest.raises(ConfigError, match=r"training\.epochs: .*found 0"):
        XmlcClassifier(SETTINGS, epochs=0).fit(part.features, part.labels)


def test_epochs_and_seed_win_over_the_config() -> None:
    part = problems.split("sparse", 60)
    estimator = XmlcClassifier(SETTINGS, epochs=2, seed=11).fit(part.features, part.labels)
    training = estimator.predictor_.metadata["config"]["training"]
    assert (training["epochs"], training["seed"], training["batch_size"]) == (2, 11, 16)


def test_fitting_leaves_the_parameters_alone() -> None:
    part = problems.split("sparse", 60)
    config = {"model": {"width": 64, "fan_in": 8}}
    estimator = XmlcClassifier(config, epochs=1)
    estimator.fit(part.features, part.labels)
    assert estimator.config is config
    assert config == {"model": {"width": 64, "fan_in": 8}}


def test_a_run_folder_can_be_kept_but_not_used_twice(tmp_path: Path) -> None:
    part = problems.split("text", 60)
    estimator = XmlcClassifier(SETTINGS, epochs=1, run=tmp_path / "run")
    estimator.fit(part.features, part.labels)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    with pytest.raises(CheckpointError, match="a new run needs a new or empty folder"):
        estimator.fit(part.features, part.labels)


def test_without_a_run_folder_nothing_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    part = problems.split("text", 60)
    estimator = XmlcClassifier(SETTINGS, epochs=1).fit(part.features, part.labels)
    assert list(tmp_path.iterdir()) == []
    assert estimator.predict(part.features).shape == (60, 5)


def test_label_names_reach_the_predictor() -> None:
    part = problems.split("sparse", 60)
    names = [f"name {label}" for label in range(problems.LABELS)]
    estimator = XmlcClassifier(SETTINGS, epochs=1).fit(part.features, part.labels, label_names=names)
    assert estimator.predictor_.label_name(3) == "name 3"


# ---- among scikit-learn's tools --------------------------------------------------------------------------


def test_parameters_are_got_set_and_cloned() -> None:
    estimator = XmlcClassifier({"model": {"fan_in": 8}}, epochs=3)
    assert estimator.get_params() == {
        "config": {"model": {"fan_in": 8}},
        "epochs": 3,
        "seed": None,
        "run": None,
    }
    copy = clone(estimator).set_params(epochs=4)
    assert (copy.epochs, estimator.epochs, copy.config) == (4, 3, estimator.config)
    with pytest.raises(ValueError, match="Invalid parameter 'epoch'"):
        copy.set_params(epoch=4)


def test_a_clone_is_unfitted(fitted: tuple[XmlcClassifier, problems.Split]) -> None:
    estimator, unseen = fitted
    with pytest.raises(ConfigError, match="call fit first"):
        clone(estimator).predict(unseen.features)


@pytest.mark.parametrize("kind", problems.KINDS)
def test_it_works_in_cross_validation(kind: problems.Kind) -> None:
    part = problems.split(kind, 240)
    scores = cross_val_score(XmlcClassifier(SETTINGS), part.features, part.labels.toarray(), cv=2)
    assert scores.shape == (2,)
    assert scores.min() > 0.5


def test_it_works_in_a_grid_search() -> None:
    part = problems.split("dense", 200)
    search = GridSearchCV(XmlcClassifier(SETTINGS), {"epochs": [1, 8]}, cv=2)
    search.fit(part.features, part.labels)
    assert search.best_params_ == {"epochs": 8}


def test_it_prints_its_parameters() -> None:
    assert "epochs=3" in repr(XmlcClassifier(epochs=3))
