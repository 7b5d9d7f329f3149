"""Stored text features: equal to the vectorizer's, computed once for each fit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from xmlc.config import TextConfig
from xmlc.data import Dataset
from xmlc.data.features import open_text_features
from xmlc.data.text import TextVectorizer
from xmlc.errors import DataError

LABELS = scipy.sparse.csr_array(np.ones((3, 1)))
TEXTS = ["a red house", "a blue car", "green"]
DATASET = Dataset.from_arrays(TEXTS, LABELS, test_features=["red car"], test_labels=LABELS[:1])
ROWS = np.array([0, 1])


def count_fits(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    fits: list[list[str]] = []
    original = TextVectorizer.fit.__func__  # type: ignore[attr-defined]

    def fit(cls: type[TextVectorizer], texts: Iterable[str], config: TextConfig) -> TextVectorizer:
        fits.append(list(texts))
        return original(cls, fits[-1], config)

    monkeypatch.setattr(TextVectorizer, "fit", classmethod(fit))
    return fits


def test_features_are_those_of_a_vectorizer_fitted_on_the_rows(cache: Path) -> None:
    features = open_text_features(DATASET, TextConfig(), ROWS)
    vectorizer = TextVectorizer.fit(TEXTS[:2], TextConfig())
    assert features.test is not None
    for rows, texts in ((features.train, TEXTS), (features.test, ["red car"])):
        np.testing.assert_array_equal(
            rows.to_scipy().toarray(), vectorizer.transform(texts).to_scipy().toarray()
        )
    assert features.train.offsets.tolist() == [0, 3, 6, 6]
    assert features.train.columns == vectorizer.columns == features.vectorizer.columns


def test_features_are_computed_once_for_data_settings_and_rows(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = count_fits(monkeypatch)
    for _ in range(2):
        open_text_features(DATASET, TextConfig(), ROWS)
        open_text_features(DATASET, TextConfig(sublinear_tf=False), ROWS)
        open_text_features(DATASET, TextConfig(), np.array([0, 2]))
        open_text_features(Dataset.from_arrays(TEXTS[::-1], LABELS), TextConfig(), ROWS)
    assert fits == [TEXTS[:2], TEXTS[:2], [TEXTS[0], TEXTS[2]], TEXTS[::-1][:2]]


def test_a_data_set_without_test_has_no_test_features(cache: Path) -> None:
    assert open_text_features(Dataset.from_arrays(TEXTS, LABELS), TextConfig(), ROWS).test is None


def test_the_vectorizer_from_the_store_goes_on_transforming(cache: Path) -> None:
    open_text_features(DATASET, TextConfig(), ROWS)
    vectorizer = open_text_features(DATASET, TextConfig(), ROWS).vectorizer
    np.testing.assert_array_equal(
        vectorizer.transform(TEXTS).values,
        TextVectorizer.fit(TEXTS[:2], TextConfig()).transform(TEXTS).values,
    )


def test_a_data_set_without_texts_is_refused(cache: Path) -> None:
    with pytest.raises(DataError, match="arrays: text features need texts, found dense features"):
        open_text_features(Dataset.from_arrays(np.ones((3, 2)), LABELS), TextConfig(), ROWS)
