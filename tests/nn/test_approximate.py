"""Approximate search beside the exact one."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from xmlc.data.rows import CsrRows, offsets_of
from xmlc.errors import ConfigError
from xmlc.nn import approximate
from xmlc.nn.approximate import ApproximateIndex
from xmlc.nn.nearest import nearest


def points(count: int, seed: int) -> Tensor:
    """Return unit vectors around a hundred centres, as embeddings of texts of many subjects lie."""
    centres = torch.randn(100, 32, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(100, (count,), generator=generator)
    return torch.nn.functional.normalize(
        centres[own] + 0.7 * torch.randn(count, 32, generator=generator), dim=1
    )


@pytest.fixture(scope="module")
def keys() -> Tensor:
    return points(20_000, 0)


@pytest.fixture(scope="module")
def index(keys: Tensor) -> ApproximateIndex:
    return ApproximateIndex(keys, 32)


def recall(found: Tensor, truth: Tensor) -> float:
    hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
    return sum(hits) / truth.numel()


def test_nearly_all_of_the_nearest_are_found(keys: Tensor, index: ApproximateIndex) -> None:
    queries = points(500, 1)
    for k in (1, 10, 50):
        scores, labels = index.search(queries, k)
        exact, truth = nearest(queries, keys, k)
        assert recall(labels, truth) > 0.95
        assert (scores <= exact + 1e-5).all() and (scores.diff(dim=1) <= 0).all()
        torch.testing.assert_close(scores, (queries[:, None] * keys[labels]).sum(2), rtol=0, atol=1e-5)


def test_more_probes_miss_fewer(keys: Tensor, index: ApproximateIndex) -> None:
    queries = points(300, 2)
    truth = nearest(queries, keys, 20)[1]
    few, many, all_lists = (
        recall(ApproximateIndex(keys, probes).search(queries, 20)[1], truth) for probes in (1, 8, 10**6)
    )
    assert few < many < all_lists
    assert all_lists > 0.999  # the rest are ties within rounding


def test_the_same_keys_give_the_same_index(keys: Tensor, index: ApproximateIndex) -> None:
    again = ApproximateIndex(keys, 32).search(points(50, 3), 10)
    for first, second in zip(index.search(points(50, 3), 10), again, strict=True):
        assert torch.equal(first, second)


def test_excluded_pairs_are_never_found(keys: Tensor, index: ApproximateIndex) -> None:
    queries = points(40, 4)
    out = nearest(queries, keys, 12)[1].sort(dim=1).values.numpy()
    out[0, :] = -1  # of the first query nothing is excluded
    lengths = (out >= 0).sum(1)
    pairs = CsrRows(offsets_of(lengths), out[out >= 0].astype(np.int32), None, len(keys))
    scores, labels = index.search(queries, 10, pairs)
    truth = nearest(queries, keys, 10, pairs)[1]
    assert recall(labels, truth) > 0.95
    assert scores.isfinite().all()
    assert torch.equal(scores[0], index.search(queries[:1], 10)[0][0])
    for row in range(1, 40):
        assert not set(labels[row].tolist()) & set(out[row].tolist())


def test_a_query_whose_lists_hold_too_few_keys_is_searched_exactly(keys: Tensor) -> None:
    small, queries = keys[:200], points(7, 5)
    index = ApproximateIndex(small, 1)
    scores, labels = index.search(queries, 200)
    exact, truth = nearest(queries, small, 200)
    assert torch.equal(labels, truth) and torch.equal(scores, exact)
    half = CsrRows(offsets_of(np.full(7, 150)), np.tile(np.arange(150, dtype=np.int32), 7), None, len(small))
    scores, labels = index.search(queries, 60, half)
    exact, truth = nearest(queries, small, 60, half)
    assert torch.equal(scores, exact) and scores[:, 50:].isinf().all()
    assert torch.equal(labels[:, :50], truth[:, :50])


@pytest.mark.parametrize("count", [1, 2, 50])
def test_few_keys_are_no_special_case(count: int, keys: Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    found = ApproximateIndex(keys[:count], 32).search(points(3, 6), count)
    torch.testing.assert_close(found[0], nearest(points(3, 6), keys[:count], count)[0])
    assert capfd.readouterr() == ("", "")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, keys: Tensor) -> None:
    importing = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "faiss":
            raise ModuleNotFoundError("No module named 'faiss'")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    approximate.faiss.cache_clear()
    message = r"needs the package of the extra `search`, found none \(No module named 'faiss'\); install it"
    with pytest.raises(ConfigError, match=message):
        ApproximateIndex(keys, 32)
