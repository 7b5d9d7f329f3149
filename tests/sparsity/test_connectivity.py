"""The connections a layer starts with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmlc.data.rows import CsrRows
from xmlc.errors import ConfigError, XmlcError
from xmlc.sparsity import (
    connectivity,
    direct_connectivity,
    draw_connections,
    index_dtype,
    random_connectivity,
)


@settings(max_examples=50)
@given(
    label=st.integers(1, 70),
    input=st.integers(1, 40),
    share=st.floats(0, 1),
    group_size=st.sampled_from([1, 16, 32, 64]),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_group_has_distinct_inputs_in_range(
    label: int, input: int, share: float, group_size: int, seed: int
) -> None:
    fan_in = max(1, round(share * input))
    indices = random_connectivity(label, input, fan_in, group_size, seed).numpy()
    assert indices.shape == (-(-label // group_size), fan_in)
    assert indices.max() < input
    assert all(len(set(row.tolist())) == fan_in for row in indices)


@pytest.mark.parametrize(
    ("input", "dtype"), [(1, torch.uint16), (65_536, torch.uint16), (65_537, torch.int32)]
)
def test_indices_are_uint16_up_to_65536_inputs(input: int, dtype: torch.dtype) -> None:
    assert index_dtype(input) == dtype
    assert random_connectivity(3, input, 1, 1, 0).dtype == dtype


@pytest.mark.parametrize("input", [65_536, 131_072])
def test_the_last_input_of_a_wide_layer_is_reached(input: int) -> None:
    indices = random_connectivity(8 * input // 1024, input, 1024, 1, 0).numpy()
    assert indices.max() == input - 1
    assert indices.min() == 0


def test_inputs_are_drawn_uniformly() -> None:
    """Chi-square of 100 inputs drawn 8,000 times; without replacement the variance is 10 percent smaller."""
    counts = np.bincount(random_connectivity(800, 100, 10, 1, 5).numpy().ravel(), minlength=100)
    chi_square = (((counts - 80.0) ** 2) / 80.0).sum()
    assert 50 < chi_square < 160


def test_the_seed_decides() -> None:
    first, again, other = (random_connectivity(20, 100, 8, 1, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_labels_differ() -> None:
    indices = random_connectivity(50, 100, 8, 1, 1).numpy()
    assert len({frozenset(row.tolist()) for row in indices}) == 50


def test_more_fan_in_than_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="fan_in must be at most the 7 inputs, found 8"):
        random_connectivity(3, 7, 8, 1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 0}, "label and fan_in must be at least 1, found label = 0"),
        ({"label": -1}, "found label = -1"),
        ({"fan_in": 0}, "fan_in = 0"),
        ({"group_size": 3}, r"group_size must be one of \(1, 16, 32, 64\), found 3"),
        ({"group_size": 0}, "group_size must be one of"),
        ({"input": 2**31}, "input must be at most 2147483647, found 2147483648"),
        ({"label": 2.5}, "label must be an integer of 64 bits, got 2.5"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_sizes_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(XmlcError, match=message):
        random_connectivity(**{"label": 10, "input": 32, "fan_in": 4, "group_size": 1, "seed": 0, **change})


def rows(matrix: list[list[float]]) -> CsrRows:
    """Return a dense matrix as compressed rows."""
    return CsrRows.from_scipy(scipy.sparse.csr_array(np.array(matrix, np.float32)), "test")


def test_direct_connections_are_the_strongest_features_of_text_and_positives() -> None:
    """Instances 0 and 1 carry label 0, instance 2 carries label 1, label 2 has only a text."""
    features = rows([[3.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    labels = rows([[1, 0, 0], [1, 0, 0], [0, 1, 0]])
    texts = rows([[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 0.0, 0.0]])
    start = direct_connectivity(features, labels, texts, 2, 1.0, 0.5, max_frequency=1.0)
    assert start.indices.tolist() == [[3, 0], [1, -1], [0, 1]]
    expected = [[1.0, 0.5 * 3 / 13**0.5], [0.5, 0.0], [0.8, 0.6]]
    np.testing.assert_allclose(start.weight, expected, rtol=1e-6)


def test_without_texts_positives_alone_decide() -> None:
    start = direct_connectivity(rows([[1.0, 2.0]]), rows([[1, 0]]), None, 3, 1.0, 1.0, max_frequency=1.0)
    assert start.indices.tolist() == [[1, 0, -1], [-1, -1, -1]]


def test_frequent_features_get_no_direct_connections() -> None:
    features, labels = rows([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), rows([[1], [1], [0]])
    start = direct_connectivity(features, labels, None, 2, 1.0, 1.0, max_frequency=0.5)
    assert start.indices.tolist() == [[1, -1]]


def test_profiles_in_several_blocks_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    features = rows(generator.random((30, 12)) * (generator.random((30, 12)) < 0.4))
    labels = rows(generator.random((30, 9)) < 0.2)
    whole = direct_connectivity(features, labels, None, 3, 1.0, 1.0, max_frequency=1.0)
    monkeypatch.setattr(connectivity, "_PROFILES_AT_ONCE", 4)
    parts = direct_connectivity(features, labels, None, 3, 1.0, 1.0, max_frequency=1.0)
    assert (parts.indices == whole.indices).all()
    np.testing.assert_array_equal(parts.weight, whole.weight)


def test_own_groups_get_what_the_whole_layer_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "GROUPS_DRAWN_AT_ONCE", 16)
    whole = random_connectivity(70, 40, 6, 1, 9).numpy()
    assert len(np.unique(whole, axis=0)) == 70, "no block is drawn like another"
    for own in (np.arange(3, 70, 5), np.arange(16, 32), np.array([69]), np.arange(70)):
        drawn = torch.empty(len(own), 6, dtype=torch.uint16)
        draw_connections(drawn, 40, 9, own, 70)
        np.testing.assert_array_equal(drawn.numpy(), whole[own])
