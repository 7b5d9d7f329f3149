"""The pool of labels that workers share: each label once, every known positive marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from contrastive import dense_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import in_workers

from xmlc.errors import ConfigError, DataError
from xmlc.losses import LabelPool, MultiPositive, label_pool

LABELS = 12
# Of each worker: what it samples, and what is known. Labels 0 and 11 are the first and the last of the range,
# label 5 is sampled by two workers, label 7 is known to worker 0 and sampled by worker 2 only.
CANDIDATES = [[5, 0, 5], [], [11, 5, 7, 2]]
KNOWN = [[[0, 7], [5, 9]], [[11], []], [[2, 5, 7, 11], [3], [7]]]


def pool_of_one() -> tuple[list[int], Tensor]:
    """Return labels and positives [query, key] of the pool in one process."""
    labels = sorted({label for each in CANDIDATES for label in each})
    rows = [row for worker in KNOWN for row in worker]
    return labels, torch.tensor([[label in row for label in labels] for row in rows])


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.query, self.key = nn.Linear(4, 3).double(), nn.Embedding(LABELS, 3).double()
        self.loss = MultiPositive(temperature=0.8)

    def forward(self, queries: Tensor, pool: LabelPool) -> Tensor:
        return self.loss(self.query(queries), self.key(pool.own), pool.positives)


def queries(rows: slice = slice(None)) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(7, 4, generator=generator, dtype=torch.float64)[rows]


def share(rank: int, size: int) -> dict[str, Any]:
    pool = label_pool(CANDIDATES[rank], KNOWN[rank], LABELS)
    first = sum(len(each) for each in KNOWN[:rank])
    towers = Towers()
    parallel = DistributedDataParallel(towers)
    loss = parallel(queries(slice(first, first + len(KNOWN[rank]))), pool)
    loss.backward()
    gradients = [value.grad for value in towers.parameters() if value.grad is not None]
    return {"pool": pool, "loss": loss.detach(), "gradients": gradients}


def test_every_label_is_encoded_once_and_every_known_positive_marked(tmp_path: Path) -> None:
    labels, positive = pool_of_one()
    found = in_workers(3, share, tmp_path)
    pools = [each["pool"] for each in found]
    assert torch.cat([pool.own for pool in pools]).tolist() == labels
    assert max(len(pool.own) for pool in pools) - min(len(pool.own) for pool in pools) <= 1
    marked = scipy.sparse.vstack([pool.positives.to_scipy() for pool in pools]).toarray() > 0
    assert np.array_equal(marked, positive.numpy())
    towers = Towers()
    keys = towers.key(torch.tensor(labels))
    scale, bias = towers.loss.log_scale.exp(), towers.loss.bias
    truth = dense_loss(towers.query(queries()), keys, positive, "decoupled_softmax", scale, bias)
    truth.backward()
    expected = [value.grad for value in towers.parameters() if value.grad is not None]
    for each in found:
        assert torch.equal(each["pool"].labels, torch.tensor(labels))
        torch.testing.assert_close(each["loss"], truth.detach())
        for ours, right in zip(each["gradients"], expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-9)


def test_in_one_process_the_pool_is_the_candidates() -> None:
    known = scipy.sparse.csr_array(np.eye(3, LABELS))
    for candidates in ([2, 0, 2], torch.tensor([[2], [0]]), np.array([0, 2], np.int32)):
        pool = label_pool(candidates, known, LABELS)
        assert pool.own.tolist() == pool.labels.tolist() == [0, 2]
        assert pool.positives.to_scipy().toarray().tolist() == [[1, 0], [0, 0], [0, 1]]


def test_a_worker_may_have_no_label_of_a_small_pool() -> None:
    class SecondOfTwo:
        rank, size = 1, 2
        gather_sizes = staticmethod(lambda *sizes, device: [list(sizes)] * 2)
        gather_rows = staticmethod(lambda rows, lengths: torch.cat([rows, rows]))

    pool = label_pool([4], [[4]], LABELS, workers=SecondOfTwo())  # type: ignore[arg-type]
    assert pool.labels.tolist() == [4] and pool.own.tolist() == [4]
    SecondOfTwo.rank = 0
    assert label_pool([4], [[4]], LABELS, workers=SecondOfTwo()).own.tolist() == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidates", "known", "message"),
    [
        ([12], [[0]], r"candidates must lie in \[0, 12\), found 12 to 12"),
        ([-1, 3], [[0]], r"found -1 to 3"),
        ([0.5], [[0]], "candidates must be integers, found float64"),
        ([0], [[12]], r"label_pool: known: labels must lie in \[0, 12\), found 12"),
        ([], [[0]], "must hold a label on some worker, found none on any"),
        ([[1], [2, 3]], [[0]], "candidates must be integers, any number, found"),
        (None, [[0]], "candidates must be integers, found object"),
        (torch.zeros(2, device="meta").long(), [[0]], "candidates must be a dense tensor, found .* meta"),
        ([0], torch.zeros(1, 2).long().to_sparse(), "known: a tensor of labels must be dense"),
    ],
)
def test_bad_labels_are_named(candidates: Any, known: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        label_pool(candidates, known, LABELS)


@pytest.mark.parametrize("count", [0, -3, 5.0, "5", True])
def test_a_number_of_labels_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(DataError, match="label_pool: label_count must be an integer of at least 1, found"):
        label_pool([0], [[0]], count)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="label_pool: device must be one that torch can use here, found 'n"):
        label_pool([0], [[0]], LABELS, device="no such")


def test_a_device_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="label_pool: device must hold values, found 'meta'; name cpu or"):
        label_pool([0], [[0]], LABELS, device="meta")


def test_ignored_labels_are_marked_by_their_position() -> None:
    pool = label_pool([5, 0, 9], [[0], [9]], LABELS, ignored=[[9, 3], []])
    assert pool.labels.tolist() == [0, 5, 9]
    assert pool.ignored.to_scipy().toarray().tolist() == [[0, 0, 1], [0, 0, 0]]
