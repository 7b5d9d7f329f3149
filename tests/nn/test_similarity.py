"""Likeness of texts added to logits, against the dense formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch
from numpy.typing import NDArray

from xmlc.config import SimilarityConfig
from xmlc.data.rows import CsrRows
from xmlc.errors import DataError
from xmlc.nn import Similarity
from xmlc.nn import similarity as module

LABEL, FEATURE, INSTANCE, BATCH = 9, 13, 20, 150  # a batch of more than two pieces


def rows(count: int, columns: int, seed: int, ones: bool = False) -> CsrRows:
    """Draw a matrix [count, columns] whose last row is empty."""
    matrix = scipy.sparse.random_array(
        (count, columns), density=0.3, format="lil", rng=seed, dtype=np.float32
    )
    matrix[count - 1] = 0.0
    drawn = CsrRows.from_scipy(matrix.tocsr(), "drawn")
    return replace(drawn, values=None) if ones else drawn


TEXTS, INSTANCES, QUERIES = rows(LABEL, FEATURE, 0), rows(INSTANCE, FEATURE, 1), rows(BATCH, FEATURE, 2)
LABELS = rows(INSTANCE, LABEL, 3, ones=True)


def dense(matrix: CsrRows) -> NDArray[np.float64]:
    """Return rows of unit length, [row, column]."""
    values = matrix.to_scipy().toarray().astype(np.float64)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(length > 0.0, length, 1.0)


def highest(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Zero all but the highest values of every row."""
    order = np.argsort(-values, axis=1, kind="stable")[:, :most]
    kept = np.zeros_like(values)
    np.put_along_axis(kept, order, np.take_along_axis(values, order, 1), 1)
    return kept


def expected(config: SimilarityConfig, text_labels: int) -> NDArray[np.float64]:
    """Return the sums [label, instance of the batch]."""
    texts = highest(dense(QUERIES) @ dense(TEXTS).T, text_labels)
    near = highest(dense(QUERIES) @ dense(INSTANCES).T, config.neighbours)
    carried = LABELS.to_scipy().toarray()
    return (config.text_weight * texts + config.neighbour_weight * near**2 @ carried).T


def added(similarity: Similarity, queries: CsrRows = QUERIES) -> NDArray[np.float64]:
    """Return the entries' sums [label, instance of the batch]."""
    offsets = similarity.offsets(queries)
    assert (offsets.label.diff() >= 0).all()
    assert offsets.label.dtype == offsets.instance.dtype == torch.int32
    assert offsets.value.dtype == torch.float32
    sums = np.zeros((LABEL, queries.rows))
    np.add.at(sums, (offsets.label.numpy(), offsets.instance.numpy()), offsets.value.numpy())
    return sums


@pytest.mark.parametrize("text_labels", [2, 500])
@pytest.mark.parametrize("weights", [(0.5, 0.0, 50), (0.0, 0.8, 3), (0.5, 0.8, 3), (0.3, 2.0, 50)], ids=str)
def test_offsets_are_the_formula(
    weights: tuple[float, float, int], text_labels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TEXT_LABELS", text_labels)
    config = SimilarityConfig(text_weight=weights[0], neighbour_weight=weights[1], neighbours=weights[2])
    similarity = Similarity.of(config, TEXTS, INSTANCES, LABELS)
    np.testing.assert_allclose(added(similarity), expected(config, text_labels), rtol=1e-5, atol=1e-6)


def test_equal_likeness_keeps_the_lowest_instances() -> None:
    same = CsrRows(np.arange(5), np.zeros(4, np.int32), None, FEATURE)
    labels = CsrRows(np.arange(5), np.arange(4, dtype=np.int32), None, LABEL)
    similarity = Similarity.of(SimilarityConfig(neighbour_weight=1.0, neighbours=2), None, same, labels)
    assert similarity.offsets(same.take(np.array([3]))).label.tolist() == [0, 1]


def test_an_empty_batch_and_one_without_features_add_nothing() -> None:
    similarity = Similarity.of(
        SimilarityConfig(text_weight=1.0, neighbour_weight=1.0), TEXTS, INSTANCES, LABELS
    )
    for count in (0, 3):
        empty = CsrRows(np.zeros(count + 1, np.int64), np.empty(0, np.int32), None, FEATURE)
        assert similarity.offsets(empty).label.numel() == 0


@pytest.mark.parametrize(
    "config", [{"text_weight": 0.4}, {"text_weight": 0.4, "neighbour_weight": 0.7}], ids=str
)
def test_arrays_give_the_same_similarity(config: dict[str, float]) -> None:
    similarity = Similarity.of(SimilarityConfig(**config), TEXTS, INSTANCES, LABELS)  # type: ignore[arg-type]
    again = Similarity.from_arrays(similarity.config, similarity.arrays(), FEATURE, LABEL)
    assert (added(similarity) == added(again)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("texts.indices", np.full(30, LABEL, np.int32)),
        ("texts.offsets", np.array([0, -5])),
        ("instances.indices", np.full(30, -1, np.int32)),
        ("instances.values", np.full(30, np.nan, np.float32)),
        ("labels.offsets", np.array([0, 3, 1])),
        ("labels.offsets", np.array([], np.int64)),
        ("texts.offsets", -np.arange(FEATURE + 1)),
        ("texts.offsets", np.zeros(FEATURE + 1, np.float32)),
        ("texts.indices", np.zeros(30, np.float32)),
        ("instances.values", np.ones(30, np.float16)),
    ],
)
def test_damaged_arrays_are_refused(name: str, value: NDArray[np.generic]) -> None:
    similarity = Similarity.of(
        SimilarityConfig(text_weight=1.0, neighbour_weight=1.0), TEXTS, INSTANCES, LABELS
    )
    arrays = similarity.arrays()
    if not name.endswith("offsets"):
        value = np.resize(value, arrays[name].shape)
    with pytest.raises(DataError, match=r"similarity\.\w+: "):
        Similarity.from_arrays(similarity.config, arrays | {name: value}, FEATURE, LABEL)


def test_arrays_of_other_dtypes_are_refused() -> None:
    similarity = Similarity.of(SimilarityConfig(text_weight=1.0), TEXTS, INSTANCES, LABELS)
    arrays = similarity.arrays()
    halves = {"texts.values": arrays["texts.values"].astype(np.float16)}
    with pytest.raises(
        DataError, match=r"must be int64 offsets, int32 indices and float32 values, found .*float16"
    ):
        Similarity.from_arrays(similarity.config, arrays | halves, FEATURE, LABEL)
