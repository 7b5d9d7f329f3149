"""Batches: order, resumption, the last short batch, the hold-out."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from xmlc.data import BatchStream, CsrRows, holdout
from xmlc.data.rows import TokenRows
from xmlc.errors import DataError


def stream(instances: int, batch_size: int, seed: int = 0) -> BatchStream:
    rng = np.random.default_rng(1)
    features = CsrRows.from_scipy(scipy.sparse.random(instances, 9, density=0.3, random_state=rng), "f")
    labels = CsrRows.from_scipy(scipy.sparse.random(instances, 7, density=0.3, random_state=rng), "l")
    return BatchStream(features, labels, np.arange(instances), batch_size, seed)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 3))
def test_an_epoch_visits_every_row_once(instances: int, batch_size: int, number: int) -> None:
    batches = list(stream(instances, batch_size).epoch(number))
    visited = np.concatenate([batch.instances for batch in batches])
    assert sorted(visited.tolist()) == list(range(instances))
    assert len(batches) == len(stream(instances, batch_size))


def test_the_last_batch_is_short_even_a_single_instance() -> None:
    assert [len(batch.instances) for batch in stream(9, 4).epoch(0)] == [4, 4, 1]


def test_features_and_labels_belong_to_the_instances() -> None:
    data = stream(20, 6)
    assert isinstance(data.features, CsrRows)
    for batch in data.epoch(3):
        assert isinstance(batch.features, CsrRows)
        np.testing.assert_array_equal(
            batch.features.to_scipy().toarray(), data.features.to_scipy().toarray()[batch.instances]
        )
        np.testing.assert_array_equal(
            batch.labels.to_scipy().toarray(), data.labels.to_scipy().toarray()[batch.instances]
        )


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 7))
def test_any_epoch_resumes_at_any_batch_without_a_replay(seed: int, number: int, start: int) -> None:
    whole = [batch.instances.tolist() for batch in stream(25, 4, seed).epoch(number)]
    assert [batch.instances.tolist() for batch in stream(25, 4, seed).epoch(number, start)] == whole[start:]


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(np.concatenate([b.instances for b in stream(50, 50, seed).epoch(number)]).tolist())
        for seed in (0, 1)
        for number in (0, 1)
    }
    assert len(orders) == 4


def test_order_stays_the_same_between_releases() -> None:
    batch = next(stream(10, 10, seed=7).epoch(2))
    expected = np.random.Generator(np.random.Philox(key=[7, 2])).permutation(10)
    assert batch.instances.tolist() == expected.tolist()


def test_sequential_keeps_the_order_of_the_rows() -> None:
    data = stream(10, 4)
    chosen = BatchStream(data.features, data.labels, np.array([7, 2, 5, 1, 0]), 2, 0)
    assert [batch.instances.tolist() for batch in chosen.sequential()] == [[7, 2], [5, 1], [0]]
    assert [batch.instances.tolist() for batch in chosen.sequential(2)] == [[0]]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_dense_features_arrive_as_float32(dtype: type[np.generic]) -> None:
    features = np.arange(12).reshape(4, 3).astype(dtype)
    labels = CsrRows(np.zeros(5, np.int64), np.empty(0, np.int32), None, 2)
    batch = next(BatchStream(features, labels, np.arange(4), 4, 0).sequential())
    assert isinstance(batch.features, np.ndarray)
    assert batch.features.dtype == np.float32
    np.testing.assert_array_equal(batch.features, features)


def test_features_and_labels_of_different_splits_are_refused() -> None:
    data = stream(10, 4)
    with pytest.raises(DataError, match="equally many rows, found 10 and 9"):
        BatchStream(data.features, stream(9, 4).labels, np.arange(9), 4, 0)


@given(st.integers(2, 200), st.floats(0, 0.99, exclude_min=True), st.integers(0, 2**63 - 1))
def test_holdout_splits_into_disjoint_sorted_rows(instances: int, fraction: float, seed: int) -> None:
    train, validation = holdout(instances, fraction, seed)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(instances))
    assert train.tolist() == sorted(train.tolist())
    assert validation.tolist() == sorted(validation.tolist())
    assert len(train) >= 1
    assert len(validation) >= 1


def test_holdout_has_the_asked_size_and_depends_on_the_seed_alone() -> None:
    _, validation = holdout(1000, 0.05, 3)
    assert len(validation) == 50
    assert validation.tolist() == holdout(1000, 0.05, 3)[1].tolist()
    assert validation.tolist() != holdout(1000, 0.05, 4)[1].tolist()


@pytest.mark.parametrize(("instances", "fraction"), [(10, 0.0), (1, 0.9), (0, 0.5)])
def test_holdout_of_nothing_or_from_a_single_instance_is_empty(instances: int, fraction: float) -> None:
    train, validation = holdout(instances, fraction, 0)
    assert train.tolist() == list(range(instances))
    assert len(validation) == 0


# ---- tokens: batches of about one length -----------------------------------------------------------------


def token_stream(instances: int, batch_size: int, seed: int = 0) -> BatchStream:
    lengths = np.random.default_rng(instances).integers(1, 100, instances)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = TokenRows(offsets, np.repeat(np.arange(instances), lengths).astype(np.uint16))
    labels = CsrRows(np.arange(instances + 1), np.zeros(instances, np.int32), None, 1)
    return BatchStream(tokens, labels, np.arange(instances), batch_size, seed)


@given(st.integers(0, 300), st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_of_tokens_visits_every_row_once_in_full_batches(
    instances: int, batch_size: int, number: int
) -> None:
    data = token_stream(instances, batch_size)
    batches = list(data.epoch(number))
    visited = [row for batch in batches for row in batch.instances.tolist()]
    assert sorted(visited) == list(range(instances))
    assert all(len(batch.instances) == batch_size for batch in batches[:-1])
    assert len(batches) == len(data)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 100))
def test_any_epoch_of_tokens_resumes_at_any_batch(seed: int, number: int, start: int) -> None:
    whole = [batch.instances.tolist() for batch in token_stream(301, 3, seed).epoch(number)]
    rest = [batch.instances.tolist() for batch in token_stream(301, 3, seed).epoch(number, start)]
    assert rest == whole[start:]


def test_batches_of_tokens_hold_texts_of_about_one_length_in_a_random_order() -> None:
    spreads, means = [], []
    for batch in token_stream(640, 10).epoch(0):
        assert isinstance(batch.features, TokenRows)
        spreads.append(int(np.ptp(batch.features.lengths)))
        means.append(float(batch.features.lengths.mean()))
        assert batch.features.ids.tolist() == np.repeat(batch.instances, batch.features.lengths).tolist()
    assert max(spreads) < 10  # 64 batches share lengths 1 to 99 out
    assert abs(np.corrcoef(means, np.arange(64))[0, 1]) < 0.5


def test_the_short_batch_of_tokens_holds_any_lengths() -> None:
    means = []
    for number in range(50):
        *_, last = token_stream(64, 10).epoch(number)
        assert isinstance(last.features, TokenRows)
        means.append(float(last.features.lengths.mean()))
    assert 40 < np.mean(means) < 60


def test_batches_in_sequence_keep_the_order_of_the_rows() -> None:
    batches = token_stream(25, 4).sequential()
    assert np.concatenate([batch.instances for batch in batches]).tolist() == list(range(25))
