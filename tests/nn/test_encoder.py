"""Encoders against dense algebra, and dropout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracles
import pytest
import scipy.sparse
import torch
from torch import Tensor

from xmlc.data import Batch, CsrRows
from xmlc.errors import DataError
from xmlc.nn.encoder import BagOfWords, DenseFeatures, drop

FEATURES, HIDDEN, BATCH = 13, 5, 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sparse_batch(values: bool = True) -> Batch:
    """Return a batch of which the third and the last instance have no features."""
    matrix = scipy.sparse.random_array(
        (BATCH, FEATURES), density=0.4, rng=np.random.default_rng(3), dtype=np.float32
    ).tolil()
    matrix[[2, BATCH - 1]] = 0
    rows = CsrRows.from_scipy(matrix, "test")
    rows = rows if values else replace(rows, values=None)
    labels = CsrRows(np.zeros(BATCH + 1, np.int64), np.empty(0, np.int32), None, 3)
    return Batch(np.arange(BATCH), rows, labels)


def dense_batch(features: np.ndarray) -> Batch:
    labels = CsrRows(np.zeros(len(features) + 1, np.int64), np.empty(0, np.int32), None, 3)
    return Batch(np.arange(len(features)), features, labels)


def matrix_of(batch: Batch) -> Tensor:
    assert isinstance(batch.features, CsrRows)
    return torch.from_numpy(batch.features.to_scipy().toarray()).double()


def bag(scale: bool = False) -> BagOfWords:
    return BagOfWords(FEATURES, HIDDEN, scale, generator())


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_a_bag_of_words_is_a_dense_product(scale: bool, values: bool) -> None:
    encoder, batch = bag(scale), sparse_batch(values)
    features = matrix_of(batch)
    if scale:
        features = features / features.norm(dim=1, keepdim=True).clamp_min(1e-30)
    embedding = encoder.embedding.detach().double()
    bound = oracles.gamma(FEATURES + 3) * (features.abs() @ embedding.abs())
    oracles.assert_within(encoder(batch, 0.0, generator()).detach(), features @ embedding, bound + 1e-30)


@pytest.mark.parametrize("scale", [True, False])
def test_an_instance_without_features_gives_zeros(scale: bool) -> None:
    hidden = bag(scale)(sparse_batch(), 0.0, generator()).detach()
    assert torch.equal(hidden[[2, BATCH - 1]], torch.zeros(2, HIDDEN))


def test_a_batch_without_any_feature_gives_zeros_and_a_gradient_of_nothing() -> None:
    empty = CsrRows(np.zeros(4, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), FEATURES)
    encoder = bag()
    labels = CsrRows(np.zeros(4, np.int64), np.empty(0, np.int32), None, 3)
    hidden = encoder(Batch(np.arange(3), empty, labels), 0.5, generator())
    hidden.backward(torch.ones_like(hidden))
    assert torch.equal(hidden.detach(), torch.zeros(3, HIDDEN))
    assert encoder.embedding.grad is not None
    assert encoder.embedding.grad.coalesce().indices().numel() == 0


def test_the_gradient_of_the_embedding_is_sparse_and_that_of_the_product() -> None:
    encoder, batch = bag(), sparse_batch()
    hidden = encoder(batch, 0.0, generator())
    gradient = torch.empty(BATCH, HIDDEN).normal_(generator=generator(1))
    hidden.backward(gradient)
    found = encoder.embedding.grad
    assert found is not None
    assert found.is_sparse
    features = matrix_of(batch)
    assert set(found.coalesce().indices()[0].tolist()) == set(features.any(dim=0).nonzero()[:, 0].tolist())
    bound = oracles.gamma(BATCH + 1) * (features.abs().T @ gradient.double().abs()) + 1e-30
    oracles.assert_within(found.to_dense(), features.T @ gradient.double(), bound)


def test_the_embedding_starts_small() -> None:
    start = BagOfWords(1000, 100, True, generator()).embedding.detach()
    assert float(start.std()) == pytest.approx(0.1, rel=0.02)


def test_dense_features_pass_unchanged() -> None:
    features = np.random.default_rng(0).standard_normal((4, HIDDEN)).astype(np.float32)
    hidden = DenseFeatures(HIDDEN)(dense_batch(features), 0.0, generator())
    np.testing.assert_array_equal(hidden.numpy(), features)


def test_hidden_shares_no_memory_with_the_data_set() -> None:
    features = np.ones((4, HIDDEN), np.float32)
    hidden = DenseFeatures(HIDDEN)(dense_batch(features), 0.0, generator())
    hidden += 1.0
    assert (features == 1.0).all()


def test_an_encoder_refuses_the_other_kind_of_features() -> None:
    with pytest.raises(DataError, match=r"features must be sparse, found dense \[2, 5\]"):
        bag()(dense_batch(np.ones((2, HIDDEN), np.float32)), 0.0, generator())
    with pytest.raises(DataError, match=r"features must be dense \[instance, 5\], found sparse ones"):
        DenseFeatures(HIDDEN)(sparse_batch(), 0.0, generator())


# ---- dropout ---------------------------------------------------------------------------------------------


def test_dropout_zeroes_its_share_and_scales_the_rest_up() -> None:
    dropped = drop(torch.full((100_000,), 2.0), 0.2, generator())
    assert set(dropped.unique().tolist()) == {0.0, 2.5}
    share = float((dropped == 0).double().mean())
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / 100_000) ** 0.5  # five standard deviations


def test_no_dropout_returns_the_values_themselves() -> None:
    values = torch.ones(3)
    assert drop(values, 0.0, generator()) is values


def test_the_generator_decides_what_drops() -> None:
    values = torch.ones(1000)
    assert torch.equal(drop(values, 0.5, generator(1)), drop(values, 0.5, generator(1)))
    assert not torch.equal(drop(values, 0.5, generator(1)), drop(values, 0.5, generator(2)))


def test_dropout_removes_features_of_a_bag_after_scaling_to_unit_length() -> None:
    """Scaling after dropout would undo its noise in the length."""
    encoder, batch = bag(True), sparse_batch()
    features = matrix_of(batch)
    features = features / features.norm(dim=1, keepdim=True).clamp_min(1e-30)
    assert isinstance(batch.features, CsrRows)
    kept = drop(torch.ones(len(batch.features.indices)), 0.5, generator(4)).double()
    rows = np.repeat(np.arange(BATCH), np.diff(batch.features.offsets))
    features[rows, batch.features.indices] *= kept
    embedding = encoder.embedding.detach().double()
    bound = oracles.gamma(FEATURES + 4) * (features.abs() @ embedding.abs())
    hidden = encoder(batch, 0.5, generator(4)).detach()
    oracles.assert_within(hidden, features @ embedding, bound + 1e-30)


def test_dense_features_drop_and_scale() -> None:
    features = np.ones((100, HIDDEN), np.float32)
    hidden = DenseFeatures(HIDDEN)(dense_batch(features), 0.5, generator())
    assert set(hidden.unique().tolist()) == {0.0, 2.0}
