"""A scikit-learn style estimator over the trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from xmlc.config import load_config
from xmlc.data import Dataset
from xmlc.data.dataset import SparseMatrix
from xmlc.errors import ConfigError, DataError
from xmlc.evaluation import Predictor, load
from xmlc.metrics import evaluate
from xmlc.training.trainer import train_into


class XmlcClassifier(BaseEstimator):
    """Extreme multi-label classifier: fit on texts, sparse or dense features; predict the top-k labels.

    Args:
        config: Settings, nested as in config.toml, such as ``{"model": {"fan_in": 64}}``.
        epochs: ``training.epochs``, or None for the config's.
        seed: ``training.seed``, or None for the config's.
        run: Run folder to keep, or None for a temporary one.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        run: str | Path | None = None,
    ) -> None:
        self.config = config
        self.epochs = epochs
        self.seed = seed
        self.run = run

    def fit(self, X: Any, Y: Any, label_names: Sequence[str] | None = None) -> Self:  # noqa: N803
        """Train.

        Args:
            X: A list of texts, or sparse or dense features [instance, feature].
            Y: [instance, label], sparse or an array; a value above 0 is a label.
            label_names: One name for each label.

        Raises:
            DataError: X and Y do not fit.
            ConfigError: A setting does not fit.
        """
        given = {"epochs": self.epochs, "seed": self.seed}
        overrides = [f"training.{key}={value}" for key, value in given.items() if value is not None]
        config = load_config(self.config, overrides)
        dataset = Dataset.from_arrays(X, _labels(Y), label_names=label_names, name="XmlcClassifier.fit")
        with tempfile.TemporaryDirectory(prefix="xmlc-") as temporary:
            run = Path(temporary) / "run" if self.run is None else Path(self.run)
            train_into(run, dataset, config, cache=Path(temporary) / "cache")
            self.predictor_: Predictor = load(run)
        self.n_features_in_ = self.predictor_.model.problem.feature_count
        return self

    def predict(self, X: Any, k: int = 5) -> NDArray[np.int64]:  # noqa: N803
        """Return the k best labels of each instance, int64 [instance, k], best first."""
        return self._top(X, k)[1]

    def predict_scores(self, X: Any, k: int = 5) -> scipy.sparse.csr_array:  # noqa: N803
        """Return the scores of the k best labels of each instance, sparse float32 [instance, label]."""
        scores, labels = self._top(X, k)
        rows = np.repeat(np.arange(len(labels)), labels.shape[1])
        shape = (len(labels), self.predictor_.model.problem.label_count)
        return scipy.sparse.csr_array((scores.ravel(), (rows, labels.ravel())), shape=shape)

    def score(self, X: Any, Y: Any) -> float:  # noqa: N803
        """Return precision at 1 against Y [instance, label], sparse or an array.

        Raises:
            DataError: Y does not fit X or the labels.
        """
        best = self.predict(X, 1)
        truth = scipy.sparse.csr_array(_labels(Y)) > 0
        shape = (len(best), self.predictor_.model.problem.label_count)
        if truth.shape != shape:
            raise DataError(
                f"XmlcClassifier: Y must be [instance, label] = {list(shape)}, found {list(truth.shape)}; "
                "score on labels of the same order as those of fit"
            )
        return evaluate(truth, best, 1).values["P@1"]

    def _top(self, X: Any, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:  # noqa: N803
        if not hasattr(self, "predictor_"):
            raise ConfigError("XmlcClassifier: predict needs a fitted estimator, found none; call fit first")
        labels = self.predictor_.model.problem.label_count
        if not 1 <= k <= labels:
            raise DataError(f"XmlcClassifier: k must lie in [1, label] = [1, {labels}], found {k}")
        return self.predictor_.top_labels(X, k)


def _labels(Y: Any) -> SparseMatrix:  # noqa: N803
    """Return labels [instance, label] as a sparse matrix; some of scikit-learn's tools pass only arrays."""
    if scipy.sparse.issparse(Y):
        return Y
    labels = np.asarray(Y)
    if labels.ndim != 2 or labels.dtype.kind not in "biuf":
        raise DataError(
            f"XmlcClassifier: Y must be a sparse matrix or a numeric array [instance, label], found "
            f"{labels.dtype} {list(labels.shape)}; give every label a column"
        )
    return scipy.sparse.csr_array(labels)
